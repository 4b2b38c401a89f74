// sgemm: C[m,n] = alpha op(A)[m,k] op(B)[k,n] + beta C, float32, row-major, layout nn
// config   turn_a0-turn_b0-BM32-TM4-LM8-BN32-TN4-rows-VM4-VN4-BK32-split_k2-cluster_k1-warps_k1-cp_async-stages3-transpose_a1-transpose_b1-read_k1-vec_a1-vec_b4-vec_c4-spread_n0-smem_pad4-exact-fragment_pipeline1-unroll_stages1-serpentine-group_m1-min_blocks1
// template

// The problem.
constexpr int m = 64;  // rows of C
constexpr int n = 64;  // columns of C
constexpr int k = 4096;  // length of a dot product
constexpr long long lda = 4096, ldb = 64, ldc = 64;  // floats from one stored row to the next

// The choice.
constexpr int BM = 32, BN = 32;  // block tile of C
constexpr int BK = 32;  // depth of one step along k
constexpr int split_k = 2;  // parts that k is cut into, each a block's
constexpr int LM = 8, LN = 4;  // lanes of a warp
constexpr int TM = 4, TN = 4;  // outputs of one thread
constexpr int VM = 4, VN = 4;  // contiguous fragments of a thread's rows and columns
constexpr int stages = 3;  // shared-memory buffers
constexpr int vec_a = 1, vec_b = 4, vec_c = 4;  // floats per global access
constexpr int smem_pad = 4;  // floats added to shared rows that are written across
constexpr int group_m = 1;  // rows of tiles worked on together

// What follows from it.
constexpr int WM = LM * TM, WN = LN * TN;  // warp tile
constexpr int warps_n = BN / WN;
constexpr int num_threads = 32 * (BM / WM) * warps_n;
constexpr int tiles_m = 2, tiles_n = 2;  // block tiles of C
constexpr int tiles_k = 128;  // steps along k
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

// What is in C. It is not read where beta is zero: it may hold NaN.
__device__ __forceinline__ Vector<vec_c> read_c(const Vector<vec_c>* from, float beta)
{
    Vector<vec_c> old = {};
    if (beta != 0.0f)
        old = *from;
    return old;
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

// How a tile lies in shared memory: as in the matrix, or turned, its columns being rows.
enum Kept { as_stored, turned };

// A tile of `rows` stored rows of `cols` floats; rows are ld floats apart in the matrix and shared_row in shared memory. Each
// thread moves its share, vec floats at a time.
template <int rows, int cols, int vec, long long ld, int shared_row, Kept kept = as_stored>
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
        return kept == turned ? col * shared_row + row : row * shared_row + col;
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
    // Each layer of the grid computes one of 16 products, whose matrices lie so many floats apart.
    constexpr long long stride_a = 262144, stride_b = 262144, stride_c = 4096;
    const long long product = blockIdx.z;
    workspace += product * 8224;  // a part for each
    A += product * stride_a;
    B += product * stride_b;
    C += product * stride_c;

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
    using TileA = Tile<BM, BK, vec_a, lda, As_row, turned>;
    const int a_m = TileA::first_row(thread), a_k = TileA::first_col(thread);
    const float* a_global = A + (block_row + a_m) * lda + (part_k + a_k);

    // B is stored along n.
    using TileB = Tile<BK, BN, vec_b, ldb, Bs_row>;
    const int b_k = TileB::first_row(thread), b_n = TileB::first_col(thread);
    const float* b_global = B + (part_k + b_k) * ldb + (block_col + b_n);
    const unsigned a_shared = shared_address(As + TileA::place(a_m, a_k));
    const unsigned b_shared = shared_address(Bs + TileB::place(b_k, b_n));

    // Start copying the next tile of A and of B into buffer `stage`.
    auto load_tile = [&](int stage) {
        TileA::copy(a_shared + 4 * stage * As_stage, a_global);
        TileB::copy(b_shared + 4 * stage * Bs_stage, b_global);
        a_global += BK;
        b_global += BK * ldb;
    };

    // Where the fragments of a thread begin.
    const float* const a_fragments = As + warp_m * WM + lane_m * VM;
    const float* const b_fragments = Bs + warp_n * WN + lane_n * VN;
    alignas(16) float reg_m[2][TM], reg_n[2][TN];
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
    #pragma unroll
    for (int stage = 0; stage < stages - 1; ++stage) {
        load_tile(stage);
        cp_async_commit();
    }
    cp_async_wait<stages - 2>();
    __syncthreads();
    load_fragments(0, 0, 0);

    // Compute on buffer `stage` while a later tile is on its way to the `vacant` one, which all threads left at the
    // last barrier. `more`: there is such a tile.
    auto step = [&](int stage, int next, int vacant, bool more) {
        #pragma unroll
        for (int kk = 0; kk < BK; ++kk) {
            // The operands of the next FFMAs are read before these start, those of the next tile too.
            if (kk < BK - 1) {
                load_fragments((kk + 1) % 2, stage, kk + 1);
            } else {
                cp_async_wait<stages - 2>();
                __syncthreads();
                load_fragments((kk + 1) % 2, next, 0);
            }
            if (kk == 0) {
                if (more)
                    load_tile(vacant);
                cp_async_commit();
            }
            multiply(kk % 2);
        }
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

    // The blocks that computed parts of one tile add them up through the workspace. The one that is done last does it,
    // in the order of k, so that the result does not depend on which one that is.
    constexpr int part_width = TM * TN < 4 ? TM * TN : 4, part_moves = TM * TN / part_width;
    constexpr int counters = 32;  // floats before the sums: whole lines
    constexpr int partials = 2;  // sums of a tile that are kept
    // The counters, [1][tiles], are zero between launches; behind them is kept [partials][tiles][part_moves][num_threads].
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
        #pragma unroll 2
        for (int other = 0; other < count; ++other)
            #pragma unroll
            for (int i = 0; i < part_moves; ++i)
                add_to(&acc[0][0] + i * part_width, load_from_l2(&kept[((first + other) * tiles * part_moves + i) * num_threads]));
    };

    keep(part);
    if (!is_last(0, split_k))
        return;
    add(0, split_k);
    // Write the thread's outputs, vec_c at a time.
    const int c_row = block_row + warp_m * WM + lane_m * VM;
    const int c_col = block_col + warp_n * WN + lane_n * VN;
    float* const c_thread = C + c_row * ldc + c_col;
    auto place = [&](int row, int col) { return reinterpret_cast<Vector<vec_c>*>(c_thread + row * ldc + col); };
    #pragma unroll
    for (int i = 0; i < TM; ++i)
        #pragma unroll
        for (int j = 0; j < TN; j += vec_c) {
            const int row = row_of(i), col = col_of(j);
            auto* const to = place(row, col);
            *to = output(&acc[i][j], alpha, beta, read_c(to, beta));
        }
}
