// sgemm: C[m,n] = alpha op(A)[m,k] op(B)[k,n] + beta C, float32, row-major, layout nn
// config   turn_a0-turn_b0-BM128-TM16-LM8-BN32-TN4-rows-VM4-VN4-BK32-split_k12-cluster_k1-warps_k1-reg-stages2-transpose_a1-transpose_b1-read_k1-vec_a4-vec_b4-vec_c4-spread_n0-smem_pad4-shifted-fragment_pipeline0-unroll_stages0-serpentine-group_m1-min_blocks1
// template

// The problem.
constexpr int m = 1760;  // rows of C
constexpr int n = 128;  // columns of C
constexpr int k = 1760;  // length of a dot product
constexpr long long lda = 1760, ldb = 128, ldc = 128;  // floats from one stored row to the next

// The choice.
constexpr int BM = 128, BN = 32;  // block tile of C
constexpr int BK = 32;  // depth of one step along k
constexpr int split_k = 12;  // parts that k is cut into, each a block's
constexpr int LM = 8, LN = 4;  // lanes of a warp
constexpr int TM = 16, TN = 4;  // outputs of one thread
constexpr int VM = 4, VN = 4;  // contiguous fragments of a thread's rows and columns
constexpr int stages = 2;  // shared-memory buffers
constexpr int vec_a = 4, vec_b = 4, vec_c = 4;  // floats per global access
constexpr int smem_pad = 4;  // floats added to shared rows that are written across
constexpr int group_m = 1;  // rows of tiles worked on together

// What follows from it.
constexpr int WM = LM * TM, WN = LN * TN;  // warp tile
constexpr int warps_n = BN / WN;
constexpr int num_threads = 32 * (BM / WM) * warps_n;
constexpr int tiles_m = 14, tiles_n = 4;  // block tiles of C
constexpr int tiles_k = 55;  // steps along k
constexpr int As_row = BM + smem_pad;  // floats from one shared row to the next
constexpr int Bs_row = BN;
constexpr int As_stage = BK * As_row;  // floats of one buffer
constexpr int Bs_stage = BK * Bs_row;

// Where output row i and column j of a thread lie behind its first: after each fragment of VM, or VN, come those of the other
// lanes, so that the lanes of a warp read shared memory without bank conflicts.
__device__ constexpr int row_of(int i) { return i + i / VM * ((LM - 1) * VM); }
__device__ constexpr int col_of(int j) { return j + j / VN * ((LN - 1) * VN); }

static_assert(LM * LN == 32, "a warp has 32 lanes");
static_assert(BM % WM == 0 && BN % WN == 0, "whole warp tiles fill the block tile");
static_assert(TM % VM == 0 && TN % VN == 0, "whole fragments fill the thread tile");
static_assert(num_threads <= 1024, "a block has at most 1024 threads");
static_assert(lda % vec_a == 0 && ldb % vec_b == 0 && ldc % vec_c == 0, "vectors are aligned in every row");

// `width` floats that move in one instruction.
template <int width>
struct alignas(4 * width) Vector {
    float lane[width];
};

// Move `width` floats in one instruction.
template <int width>
__device__ __forceinline__ void move(float* to, const float* from)
{
    *reinterpret_cast<Vector<width>*>(to) = *reinterpret_cast<const Vector<width>*>(from);
}

// The outputs of vec_c sums.
__device__ __forceinline__ Vector<vec_c> output(const float* sums, float alpha, float beta, const Vector<vec_c>& old)
{
    Vector<vec_c> out;
    #pragma unroll
    for (int v = 0; v < vec_c; ++v)
        out.lane[v] = alpha * sums[v] + beta * old.lane[v];
    return out;
}

// How a tile lies in shared memory: as in the matrix, or turned, its columns being rows.
enum Kept { as_stored, turned };

// A tile of `rows` stored rows of `cols` floats; rows are ld floats apart in the matrix and shared_row in shared memory. Each
// thread moves its share, vec floats at a time; `together` rows one after the other, to write them across at once.
template <int rows, int cols, int vec, long long ld, int shared_row, Kept kept = as_stored, int together = 1>
struct Tile {
    static constexpr int width = cols / vec;  // moves along one stored row
    static constexpr int moves = rows * width / num_threads;  // moves of one thread
    static constexpr int passes = width > num_threads ? width / num_threads : 1;  // of the block along one stored row
    static constexpr int step = passes > 1 ? 1 : num_threads / width;  // stored rows between a thread's moves
    static_assert(rows * width % num_threads == 0, "every thread moves the same share of a tile");

    // Stored row and column of a thread's first move.
    __device__ static int first_row(int thread) { return passes > 1 ? 0 : thread / width * together; }
    __device__ static int first_col(int thread) { return (passes > 1 ? thread : thread % width) * vec; }

    // Those of its move i, counted from there.
    __device__ static constexpr int row_of(int i) { return i / (passes * together) * (step * together) + i % together; }
    __device__ static constexpr int col_of(int i) { return i % passes * (num_threads * vec); }

    // Where a stored row and column lie in shared memory.
    __device__ static constexpr int place(int row, int col)
    {
        return kept == turned ? col * shared_row + row : row * shared_row + col;
    }

    // Read a thread's moves.
    __device__ __forceinline__ static void fetch(Vector<vec> (&staged)[moves], const float* from)
    {
        #pragma unroll
        for (int i = 0; i < moves; ++i) {
            const int row = row_of(i), col = col_of(i);
            const auto* const stored = reinterpret_cast<const Vector<vec>*>(from + row * ld + col);
            staged[i] = *stored;
        }
    }

    // Write them to shared memory.
    __device__ __forceinline__ static void store(float* to, const Vector<vec> (&staged)[moves])
    {
        if constexpr (kept == turned) {
            #pragma unroll
            for (int i = 0; i < moves; i += together)
                #pragma unroll
                for (int v = 0; v < vec; ++v) {
                    Vector<together> across;
                    #pragma unroll
                    for (int r = 0; r < together; ++r)
                        across.lane[r] = staged[i + r].lane[v];
                    *reinterpret_cast<Vector<together>*>(to + place(row_of(i), col_of(i) + v)) = across;
                }
        } else {
            #pragma unroll
            for (int i = 0; i < moves; ++i)
                *reinterpret_cast<Vector<vec>*>(to + place(row_of(i), col_of(i))) = staged[i];
        }
    }
};

// Take `width` sums of a thread ...
template <int width>
__device__ __forceinline__ Vector<width> pack(const float* sums)
{
    Vector<width> packed;
    #pragma unroll
    for (int v = 0; v < width; ++v)
        packed.lane[v] = sums[v];
    return packed;
}

// ... and add others to them, or put the `first` ones there.
template <int width>
__device__ __forceinline__ void add_to(float* sums, Vector<width> more, bool first = false)
{
    #pragma unroll
    for (int v = 0; v < width; ++v)
        sums[v] = first ? more.lane[v] : sums[v] + more.lane[v];
}

// Count up to `last`, then start again at 0; what the block wrote before is visible to whoever counts later.
__device__ __forceinline__ unsigned count_in(unsigned* counter, unsigned last)
{
    unsigned before;
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(last) : "memory");
    return before;
}

// Read what another block wrote: from L2, since the SMs' own caches do not see each other's writes.
template <int width>
__device__ __forceinline__ Vector<width> load_from_l2(const Vector<width>* from)
{
    Vector<width> to;
    if constexpr (width == 4)
        asm volatile("ld.global.cg.v4.f32 { %0, %1, %2, %3 }, [%4];"
                     : "=f"(to.lane[0]), "=f"(to.lane[1]), "=f"(to.lane[2]), "=f"(to.lane[3])
                     : "l"(from)
                     : "memory");
    else if constexpr (width == 2)
        asm volatile("ld.global.cg.v2.f32 { %0, %1 }, [%2];" : "=f"(to.lane[0]), "=f"(to.lane[1]) : "l"(from) : "memory");
    else
        asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(to.lane[0]) : "l"(from) : "memory");
    return to;
}

// From compute capability 9.0 on a kernel is launched when the blocks of the one before it have ended (programmatic dependent
// launch), which may be before their writes are seen: so it waits for that first.
__device__ __forceinline__ void wait_for_turn()
{
    #if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    #endif
}

extern "C" __global__ void __launch_bounds__(num_threads, 1)
sgemm(float alpha, const float* A, const float* B, float beta, float* C, float* workspace)
{
    wait_for_turn();
    extern __shared__ __align__(16) float shared[];
    float* const As = shared;                      // [stages][BK][As_row]
    float* const Bs = shared + stages * As_stage;  // [stages][BK][Bs_row]

    const int thread = threadIdx.x;
    const int warp = thread / 32, lane = thread % 32;
    const int warp_m = warp / warps_n, warp_n = warp % warps_n;
    const int lane_m = lane / LN, lane_n = lane % LN;
    // k is cut into split_k parts of whole steps; all blocks of one part come before those of the next.
    constexpr int tiles = tiles_m * tiles_n;
    const int part = blockIdx.x / tiles, tile_id = blockIdx.x % tiles;
    const int first_step = part * (tiles_k / split_k) + min(part, tiles_k % split_k);
    const int steps = tiles_k / split_k + (part < tiles_k % split_k);  // of this part
    const int part_k = first_step * BK;  // where the part begins
    // Blocks walk down group_m rows of tiles before they move on along n, so that blocks that run together share
    // their tiles of A and B in L2.
    constexpr int group_tiles = group_m * tiles_n;
    const int group = tile_id / group_tiles, in_group = tile_id % group_tiles;
    constexpr int group_rows = group_m;
    const int tile_row = (group * group_m + in_group % group_rows) * BM;  // the first row that this block writes
    const int block_row = min(tile_row, m - BM);  // the last tile begins earlier instead of reaching over the edge
    const int block_col = in_group / group_rows * BN;

    // A is stored along k: where a thread's first move lies in the tile, and in memory.
    using TileA = Tile<BM, BK, vec_a, lda, As_row, turned, 4>;
    const int a_m = TileA::first_row(thread), a_k = TileA::first_col(thread);
    const float* a_global = A + (block_row + a_m) * lda + (part_k + a_k);

    // B is stored along n.
    using TileB = Tile<BK, BN, vec_b, ldb, Bs_row>;
    const int b_k = TileB::first_row(thread), b_n = TileB::first_col(thread);
    const float* b_global = B + (part_k + b_k) * ldb + (block_col + b_n);
    const int a_shared = TileA::place(a_m, a_k), b_shared = TileB::place(b_k, b_n);
    Vector<vec_a> a_staged[TileA::moves];
    Vector<vec_b> b_staged[TileB::moves];

    // Read the next tile of A and of B into registers.
    auto fetch_tile = [&]() {
        TileA::fetch(a_staged, a_global);
        TileB::fetch(b_staged, b_global);
        a_global += BK;
        b_global += BK * ldb;
    };

    // Write the tile that was read last into buffer `stage`.
    auto store_tile = [&](int stage) {
        TileA::store(As + (stage * As_stage + a_shared), a_staged);
        TileB::store(Bs + (stage * Bs_stage + b_shared), b_staged);
    };

    // Where the fragments of a thread begin.
    const float* const a_fragments = As + warp_m * WM + lane_m * VM;
    const float* const b_fragments = Bs + warp_n * WN + lane_n * VN;
    alignas(16) float reg_m[1][TM], reg_n[1][TN];
    float acc[TM][TN] = {};

    // Read row kk of buffer `stage`: the operands of TM * TN FFMAs.
    auto load_fragments = [&](int half, int stage, int kk) {
        constexpr int read_m = VM < 4 ? VM : 4;
        #pragma unroll
        for (int i = 0; i < TM; i += read_m)
            move<read_m>(&reg_m[half][i], &a_fragments[stage * As_stage + kk * As_row + row_of(i)]);
        constexpr int read_n = VN < 4 ? VN : 4;
        #pragma unroll
        for (int j = 0; j < TN; j += read_n)
            move<read_n>(&reg_n[half][j], &b_fragments[stage * Bs_stage + kk * Bs_row + col_of(j)]);
    };

    // acc += reg_m x reg_n; odd rows run backwards, so that one operand stays in the reuse cache at each turn.
    auto multiply = [&](int half) {
        #pragma unroll
        for (int i = 0; i < TM; ++i)
            #pragma unroll
            for (int step = 0; step < TN; ++step) {
                const int j = i % 2 ? TN - 1 - step : step;
                acc[i][j] += reg_m[half][i] * reg_n[half][j];
            }
    };

    // Fill every buffer but one.
    fetch_tile();
    store_tile(0);
    __syncthreads();

    // Compute on buffer `stage` while a later tile is on its way to the `vacant` one, which all threads left at the
    // last barrier. `more`: there is such a tile.
    auto step = [&](int stage, int next, int vacant, bool more) {
        if (more)
            fetch_tile();
        #pragma unroll
        for (int kk = 0; kk < BK; ++kk) {
            load_fragments(0, stage, kk);
            multiply(0);
        }
        if (more)
            store_tile(next);
        __syncthreads();
    };

    int stage = 0, vacant = stages - 1;
    #pragma unroll 1
    for (int tile = 0; tile < steps; ++tile) {
        const int next = stage + 1 == stages ? 0 : stage + 1;
        step(stage, next, vacant, tile + stages - 1 < steps);
        vacant = stage;
        stage = next;
    }

    // The blocks that computed parts of one tile add them up through the workspace. The one that is done last does it,
    // in the order of k, so that the result does not depend on which one that is.
    constexpr int part_width = TM * TN < 4 ? TM * TN : 4, part_moves = TM * TN / part_width;
    constexpr int counters = 224;  // floats before the sums: whole lines
    constexpr int partials = 15;  // sums of a tile that are kept
    // The counters, [4][tiles], are zero between launches; behind them is kept [partials][tiles][part_moves][num_threads].
    auto* const kept = reinterpret_cast<Vector<part_width>*>(workspace + counters)
        + tile_id * part_moves * num_threads + thread;
    auto* const arrivals = reinterpret_cast<unsigned*>(workspace) + tile_id;

    // Keep this block's sums as number `to`.
    auto keep = [&](int to) {
        #pragma unroll
        for (int i = 0; i < part_moves; ++i)
            kept[(to * tiles * part_moves + i) * num_threads] = pack<part_width>(&acc[0][0] + i * part_width);
    };

    // Count this block in; whether it is the last of `count`, and so sees what all of them kept.
    auto is_last = [&](int counter, int count) {
        __syncthreads();
        return __syncthreads_or(thread == 0 && count_in(&arrivals[counter * tiles], count - 1) == count - 1);
    };

    // Sum up `count` kept sums from number `first` on.
    auto add = [&](int first, int count) {
        #pragma unroll
        for (int i = 0; i < TM; ++i)
            #pragma unroll
            for (int j = 0; j < TN; ++j)
                acc[i][j] = 0.0f;
        #pragma unroll 1
        for (int other = 0; other < count; ++other)
            #pragma unroll
            for (int i = 0; i < part_moves; ++i)
                add_to(&acc[0][0] + i * part_width, load_from_l2(&kept[((first + other) * tiles * part_moves + i) * num_threads]));
    };

    keep(part);
    // Too many for one block: sum_group parts become one sum, and then these are added up.
    constexpr int sum_group = 4, sum_groups = 3;
    if (!is_last(1 + part / sum_group, sum_group))
        return;
    add(part / sum_group * sum_group, sum_group);
    keep(split_k + part / sum_group);
    if (!is_last(0, sum_groups))
        return;
    add(split_k, sum_groups);
    // Write the thread's outputs, vec_c at a time.
    const int c_row = block_row + warp_m * WM + lane_m * VM;
    const int c_col = block_col + warp_n * WN + lane_n * VN;
    float* const c_thread = C + c_row * ldc + c_col;
    auto place = [&](int row, int col) { return reinterpret_cast<Vector<vec_c>*>(c_thread + row * ldc + col); };
    auto inside = [&](int row, int col) { return c_row + row >= tile_row; };
    // Of some rows at a time all of C is read before any of it is written: a read behind a write waits for it.
    constexpr int read_rows = 4;
    #pragma unroll
    for (int first = 0; first < TM; first += read_rows) {
        Vector<vec_c> old[read_rows][TN / vec_c] = {};
        if (beta != 0.0f)  // C is not read otherwise: it may hold NaN
            #pragma unroll
            for (int i = first; i < first + read_rows; ++i)
                #pragma unroll
                for (int j = 0; j < TN; j += vec_c) {
                    const int row = row_of(i), col = col_of(j);
                    if (inside(row, col))
                        old[i - first][j / vec_c] = *place(row, col);
                }
        __syncwarp();  // else the compiler lets the reads sink to the writes, to save registers
        #pragma unroll
        for (int i = first; i < first + read_rows; ++i)
            #pragma unroll
            for (int j = 0; j < TN; j += vec_c) {
                const int row = row_of(i), col = col_of(j);
                if (!inside(row, col))
                    continue;
                auto* const to = place(row, col);
                *to = output(&acc[i][j], alpha, beta, old[i - first][j / vec_c]);
            }
    }
}
