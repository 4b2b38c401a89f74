// sgemm: C[m,n] = alpha op(A)[m,k] op(B)[k,n], float32, row-major, layout nt
// config   turn_a0-turn_b0-BM32-TM8-LM4-BN64-TN2-rows-VM1-VN1-BK16-split_k32-cluster_k1-warps_k4-cp_async-stages4-transpose_a0-transpose_b0-read_k4-vec_a1-vec_b1-vec_c1-spread_n0-smem_pad4-exact-fragment_pipeline0-unroll_stages1-serpentine-group_m1-min_blocks1
// template

// The problem.
constexpr int m = 64;  // rows of C
constexpr int n = 64;  // columns of C
constexpr int k = 64000;  // length of a dot product
constexpr long long lda = 64000, ldb = 64000, ldc = 64;  // floats from one stored row to the next

// The choice.
constexpr int BM = 32, BN = 64;  // block tile of C
constexpr int BK = 16;  // depth of one step along k
constexpr int split_k = 32;  // parts that k is cut into, each a block's
constexpr int warps_k = 4;  // warps that share a tile and take turns along k
constexpr int LM = 4, LN = 8;  // lanes of a warp
constexpr int TM = 8, TN = 2;  // outputs of one thread
constexpr int VM = 1, VN = 1;  // contiguous fragments of a thread's rows and columns
constexpr int read_k = 4;  // steps along k that one fragment covers
constexpr int stages = 4;  // shared-memory buffers
constexpr int vec_a = 1, vec_b = 1, vec_c = 1;  // floats per global access
constexpr int smem_pad = 4;  // floats added to shared rows that are written across
constexpr int group_m = 1;  // rows of tiles worked on together

// What follows from it.
constexpr int WM = LM * TM, WN = LN * TN;  // warp tile
constexpr int warps_n = BN / WN;
constexpr int warps_m = BM / WM;
constexpr int num_threads = 32 * warps_m * warps_n * warps_k;
constexpr int reads = BK / (warps_k * read_k);  // times in a step that a thread reads fragments
constexpr int tiles_m = 2, tiles_n = 1;  // block tiles of C
constexpr int tiles_k = 4000;  // steps along k
constexpr int As_row = BK + smem_pad;  // floats from one shared row to the next
constexpr int Bs_row = BK + smem_pad;
constexpr int As_stage = BM * As_row;  // floats of one buffer
constexpr int Bs_stage = BN * Bs_row;

// Where output row i and column j of a thread lie behind its first: after each fragment of VM, or VN, come those of the other
// lanes, so that the lanes of a warp read shared memory without bank conflicts.
__device__ constexpr int row_of(int i) { return i + i / VM * ((LM - 1) * VM); }
__device__ constexpr int col_of(int j) { return j + j / VN * ((LN - 1) * VN); }

static_assert(LM * LN == 32, "a warp has 32 lanes");
static_assert(BM % WM == 0 && BN % WN == 0, "whole warp tiles fill the block tile");
static_assert(TM % VM == 0 && TN % VN == 0, "whole fragments fill the thread tile");
static_assert(m % BM == 0 && n % BN == 0, "tiles end at the edge of C");
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
__device__ __forceinline__ Vector<vec_c> output(const float* sums, float alpha)
{
    Vector<vec_c> out;
    #pragma unroll
    for (int v = 0; v < vec_c; ++v)
        out.lane[v] = alpha * sums[v];
    return out;
}

__device__ __forceinline__ unsigned shared_address(const void* pointer)
{
    return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// Start copying `bytes` bytes from global to shared memory; zeros arrive instead where `inside` is false.
template <int bytes>
__device__ __forceinline__ void cp_async(unsigned to, const float* from, bool inside = true)
{
    if constexpr (bytes == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(inside ? 16 : 0) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(bytes), "r"(inside ? bytes : 0) : "memory");
}

// Close the group of copies started since the last commit.
__device__ __forceinline__ void cp_async_commit()
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Wait until at most `pending` groups of this thread are still on their way.
template <int pending>
__device__ __forceinline__ void cp_async_wait()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// A tile of `rows` stored rows of `cols` floats; rows are ld floats apart in the matrix and shared_row in shared memory. Each
// thread moves its share, vec floats at a time.
template <int rows, int cols, int vec, long long ld, int shared_row>
struct Tile {
    static constexpr int width = cols / vec;  // moves along one stored row
    static constexpr int moves = rows * width / num_threads;  // moves of one thread
    static constexpr int passes = width > num_threads ? width / num_threads : 1;  // of the block along one stored row
    static constexpr int step = passes > 1 ? 1 : num_threads / width;  // stored rows between a thread's moves
    static_assert(rows * width % num_threads == 0, "every thread moves the same share of a tile");

    // Stored row and column of a thread's first move.
    __device__ static int first_row(int thread) { return passes > 1 ? 0 : thread / width; }
    __device__ static int first_col(int thread) { return (passes > 1 ? thread : thread % width) * vec; }

    // Those of its move i, counted from there.
    __device__ static constexpr int row_of(int i) { return i / passes * step; }
    __device__ static constexpr int col_of(int i) { return i % passes * (num_threads * vec); }

    // Where a stored row and column lie in shared memory.
    __device__ static constexpr int place(int row, int col)
    {
        return row * shared_row + col;
    }

    // Start a thread's copies to shared memory.
    __device__ __forceinline__ static void copy(unsigned to, const float* from)
    {
        #pragma unroll
        for (int i = 0; i < moves; ++i) {
            const int row = row_of(i), col = col_of(i);
            cp_async<4 * vec>(to + 4 * place(row, col), from + row * ld + col);
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
    float* const As = shared;                      // [stages][BM][As_row]
    float* const Bs = shared + stages * As_stage;  // [stages][BN][Bs_row]

    const int thread = threadIdx.x;
    const int warp = thread / 32, lane = thread % 32;
    const int warp_k = warp / (warps_m * warps_n), warp_m = warp / warps_n % warps_m, warp_n = warp % warps_n;
    const int lane_m = lane / LN, lane_n = lane % LN;
    // k is cut into split_k parts of whole steps; all blocks of one part come before those of the next.
    constexpr int tiles = tiles_m * tiles_n;
    const int part = blockIdx.x / tiles, tile_id = blockIdx.x % tiles;
    constexpr int steps = tiles_k / split_k;  // of each part
    const int first_step = part * steps;
    const int part_k = first_step * BK;  // where the part begins
    // Blocks walk down group_m rows of tiles before they move on along n, so that blocks that run together share
    // their tiles of A and B in L2.
    constexpr int group_tiles = group_m * tiles_n;
    const int group = tile_id / group_tiles, in_group = tile_id % group_tiles;
    constexpr int group_rows = group_m;
    const int block_row = (group * group_m + in_group % group_rows) * BM;
    const int block_col = in_group / group_rows * BN;

    // A is stored along k: where a thread's first move lies in the tile, and in memory.
    using TileA = Tile<BM, BK, vec_a, lda, As_row>;
    const int a_m = TileA::first_row(thread), a_k = TileA::first_col(thread);
    const float* a_global = A + (block_row + a_m) * lda + (part_k + a_k);

    // B is stored along k.
    using TileB = Tile<BN, BK, vec_b, ldb, Bs_row>;
    const int b_n = TileB::first_row(thread), b_k = TileB::first_col(thread);
    const float* b_global = B + (block_col + b_n) * ldb + (part_k + b_k);
    const unsigned a_shared = shared_address(As + TileA::place(a_m, a_k));
    const unsigned b_shared = shared_address(Bs + TileB::place(b_n, b_k));

    // Start copying the next tile of A and of B into buffer `stage`.
    auto load_tile = [&](int stage) {
        TileA::copy(a_shared + 4 * stage * As_stage, a_global);
        TileB::copy(b_shared + 4 * stage * Bs_stage, b_global);
        a_global += BK;
        b_global += BK;
    };

    // Where the fragments of a thread begin.
    const float* const a_fragments = As + (warp_m * WM + lane_m * VM) * As_row + warp_k * (BK / warps_k);
    const float* const b_fragments = Bs + (warp_n * WN + lane_n * VN) * Bs_row + warp_k * (BK / warps_k);
    alignas(16) float reg_m[1][TM][read_k], reg_n[1][TN][read_k];
    float acc[TM][TN] = {};

    // Read rows read * read_k and the next ones of buffer `stage`: along k where an operand is kept so, else row by row.
    auto load_fragments = [&](int half, int stage, int read) {
        #pragma unroll
        for (int i = 0; i < TM; ++i)
            move<read_k>(reg_m[half][i], &a_fragments[stage * As_stage + row_of(i) * As_row + read * read_k]);
        #pragma unroll
        for (int j = 0; j < TN; ++j)
            move<read_k>(reg_n[half][j], &b_fragments[stage * Bs_stage + col_of(j) * Bs_row + read * read_k]);
    };

    // acc += reg_m x reg_n; odd rows run backwards, so that one operand stays in the reuse cache at each turn.
    auto multiply_step = [&](int half, int r) {
        #pragma unroll
        for (int i = 0; i < TM; ++i)
            #pragma unroll
            for (int step = 0; step < TN; ++step) {
                const int j = i % 2 ? TN - 1 - step : step;
                acc[i][j] += reg_m[half][i][r] * reg_n[half][j][r];
            }
    };

    // One read's worth of FFMAs.
    auto multiply = [&](int half) {
        #pragma unroll
        for (int r = 0; r < read_k; ++r)
            multiply_step(half, r);
    };

    // Fill every buffer but one.
    #pragma unroll
    for (int stage = 0; stage < stages - 1; ++stage) {
        load_tile(stage);
        cp_async_commit();
    }
    cp_async_wait<stages - 2>();
    __syncthreads();

    // Compute on buffer `stage` while a later tile is on its way to the `vacant` one, which all threads left at the
    // last barrier. `more`: there is such a tile.
    auto step = [&](int stage, int next, int vacant, bool more) {
        if (more)
            load_tile(vacant);
        cp_async_commit();
        #pragma unroll
        for (int kk = 0; kk < reads; ++kk) {
            load_fragments(0, stage, kk);
            multiply(0);
        }
        cp_async_wait<stages - 2>();
        __syncthreads();
    };

    int tile = 0;
    #pragma unroll 1
    for (; tile + stages <= steps; tile += stages)
        #pragma unroll
        for (int s = 0; s < stages; ++s)
            step(s, (s + 1) % stages, (s + stages - 1) % stages, tile + s + stages - 1 < steps);

    #pragma unroll
    for (int s = 0; s < steps % stages; ++s)
        step(s, (s + 1) % stages, (s + stages - 1) % stages, false);

    // Warps that took turns along k add up their sums in shared memory, in the order of k; each then owns some rows.
    constexpr int turn_threads = num_threads / warps_k;  // threads of one turn
    constexpr int own_rows = TM / warps_k;
    constexpr int add_width = TN < 4 ? TN : 4, adds = TN / add_width;  // vectors of one row of a thread
    const int own_first = warp_k * own_rows;
    auto* const warp_sums = reinterpret_cast<Vector<add_width>*>(shared) + thread % turn_threads;  // [warps_k][TM][adds][turn_threads]
    float own[own_rows][TN];
    __syncthreads();  // nobody reads the last tile any more
    #pragma unroll
    for (int i = 0; i < TM; ++i)
        #pragma unroll
        for (int j = 0; j < adds; ++j)
            warp_sums[((warp_k * TM + i) * adds + j) * turn_threads] = pack<add_width>(&acc[i][j * add_width]);
    __syncthreads();
    #pragma unroll
    for (int i = 0; i < own_rows; ++i)
        #pragma unroll
        for (int j = 0; j < adds; ++j)
            #pragma unroll
            for (int turn = 0; turn < warps_k; ++turn)
                add_to(&own[i][j * add_width], warp_sums[((turn * TM + own_first + i) * adds + j) * turn_threads], turn == 0);

    // The blocks that computed parts of one tile add them up through the workspace. The one that is done last does it,
    // in the order of k, so that the result does not depend on which one that is.
    constexpr int part_width = own_rows * TN < 4 ? own_rows * TN : 4, part_moves = own_rows * TN / part_width;
    constexpr int counters = 32;  // floats before the sums: whole lines
    constexpr int partials = 36;  // sums of a tile that are kept
    // The counters, [5][tiles], are zero between launches; behind them is kept [partials][tiles][part_moves][num_threads].
    auto* const kept = reinterpret_cast<Vector<part_width>*>(workspace + counters)
        + tile_id * part_moves * num_threads + thread;
    auto* const arrivals = reinterpret_cast<unsigned*>(workspace) + tile_id;

    // Keep this block's sums as number `to`.
    auto keep = [&](int to) {
        #pragma unroll
        for (int i = 0; i < part_moves; ++i)
            kept[(to * tiles * part_moves + i) * num_threads] = pack<part_width>(&own[0][0] + i * part_width);
    };

    // Count this block in; whether it is the last of `count`, and so sees what all of them kept.
    auto is_last = [&](int counter, int count) {
        __syncthreads();
        return __syncthreads_or(thread == 0 && count_in(&arrivals[counter * tiles], count - 1) == count - 1);
    };

    // Sum up `count` kept sums from number `first` on.
    auto add = [&](int first, int count) {
        #pragma unroll
        for (int i = 0; i < own_rows; ++i)
            #pragma unroll
            for (int j = 0; j < TN; ++j)
                own[i][j] = 0.0f;
        #pragma unroll 8
        for (int other = 0; other < count; ++other)
            #pragma unroll
            for (int i = 0; i < part_moves; ++i)
                add_to(&own[0][0] + i * part_width, load_from_l2(&kept[((first + other) * tiles * part_moves + i) * num_threads]));
    };

    keep(part);
    // Too many for one block: sum_group parts become one sum, and then these are added up.
    constexpr int sum_group = 8, sum_groups = 4;
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
    #pragma unroll
    for (int i = 0; i < own_rows; ++i)
        #pragma unroll
        for (int j = 0; j < TN; j += vec_c) {
            const int row = row_of(own_first + i), col = col_of(j);
            auto* const to = place(row, col);
            *to = output(&own[i][j], alpha);
        }
}
