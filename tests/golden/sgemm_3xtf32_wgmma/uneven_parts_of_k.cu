// sgemm_3xtf32_wgmma: C[m,n] = alpha op(A)[m,k] op(B)[k,n], float32, row-major, layout nn,
// on Hopper's tensor cores: every operand is split into two TF32 numbers, x = hi + lo, and
// a b = a_hi b_hi + a_hi b_lo + a_lo b_hi but for a_lo b_lo, which is below 2^-21 |a b|.
// architecture sm_90a, the only one with wgmma
// config   BM64-BN128-BK32-split_k3-stages3-splits2-vec_a4-vec_b4-vec_c1-guarded-group_m4-min_blocks1
// template

// The problem.
constexpr int m = 1000;  // rows of C
constexpr int n = 1000;  // columns of C
constexpr int k = 1000;  // length of a dot product
constexpr long long lda = 1000, ldb = 1000, ldc = 1000;  // floats from one stored row to the next

// The choice.
constexpr int BM = 64, BN = 128;  // block tile of C
constexpr int BK = 32;  // depth of one step along k: 128 bytes, the width of the swizzle
constexpr int stages = 3;  // shared-memory buffers
constexpr int splits = 2;  // shared-memory buffers for what is split
constexpr int vec_a = 4, vec_b = 4, vec_c = 1;  // floats per global access
constexpr int group_m = 4;  // rows of tiles worked on together
constexpr int split_k = 3;  // parts that k is cut into
// What follows from it. An instruction multiplies rows, here of op(B) transposed, from registers by columns, of op(A) transposed, from
// shared memory, where they must lie along k, as A is stored: it makes C transposed.
constexpr int rows = BN, columns = BM;
constexpr int wgmma_m = 64, wgmma_k = 8;  // rows and depth of one instruction
constexpr int slices = BK / wgmma_k;  // of them along one step
constexpr int TN = columns / 2;  // outputs of a thread
constexpr int num_threads = 128 * (rows / wgmma_m);  // one warpgroup for each 64 rows
constexpr int tiles_m = 16, tiles_n = 8;  // block tiles of C
constexpr int tiles_k = 32;  // steps along k
constexpr int first_k = 8;  // depth of the first step: the remainder comes first, so the others need no check
constexpr int As_row = BK, Bs_row = rows + 8;  // floats from one shared row to the next; the pad avoids bank conflicts
constexpr int As_stage = columns * As_row, Bs_stage = BK * Bs_row;  // floats of one buffer
constexpr int Bs_m = 1, Bs_k = Bs_row;  // floats from one element to the next along rows, along k

static_assert(BK == 32, "a shared row is as wide as the swizzle");
static_assert(rows % wgmma_m == 0 && columns % 8 == 0 && columns <= 256, "whole instructions fill the block tile");
static_assert(num_threads <= 1024, "a block has at most 1024 threads");
static_assert(num_threads == 128 || num_threads == 256, "the rows of a thread's copies differ from its first in bits of their own");
static_assert(columns * BK % (4 * num_threads) == 0, "every thread splits the same share of the columns");
static_assert(lda % vec_a == 0 && ldb % vec_b == 0 && ldc % vec_c == 0, "vectors are aligned in every row");

// `width` floats that move in one instruction.
template <int width>
struct alignas(4 * width) Vector {
    float lane[width];
};

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

// How a tile lies in shared memory: as in the matrix, or with the 16-byte pieces of a row in another order, as wgmma reads them.
enum Kept { as_stored, swizzled };

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
        if constexpr (kept == swizzled)
            return row * shared_row + (col ^ row % 8 * 4);
        return row * shared_row + col;
    }

    // Start a thread's copies to shared memory, the first of which lies at at_row, at_col. What does not lie before the ends is zero.
    __device__ __forceinline__ static void copy(unsigned to, const float* from,
        int at_row = 0, int end_row = rows, int at_col = 0, int end_col = cols)
    {
        #pragma unroll
        for (int i = 0; i < moves; ++i) {
            const int row = row_of(i), col = col_of(i);
            const bool inside = at_row + row < end_row && at_col + col < end_col;
            const unsigned place = to + 4 * (row * shared_row + col);
            cp_async<4 * vec>(kept == swizzled ? place ^ row % 8 * 16 : place, from + row * ld + col, inside);
        }
    }
};

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

// x = hi + lo: hi is x rounded to the 10 bits of mantissa that TF32 has, lo the rest, exactly. The 13 bits that TF32
// lacks stay in hi: the tensor cores ignore them.
struct Split {
    unsigned hi, lo;
};

__device__ __forceinline__ Split split(float x)
{
    const unsigned hi = __float_as_uint(x) + 0x1000u;
    return {hi, __float_as_uint(x - __uint_as_float(hi & 0xffffe000u))};
}

// Start sum[64,64] = a[64,8] b[8,64] + (add ? sum : 0) by a warpgroup: a in each lane's registers as the PTX ISA numbers them,
// b in shared memory behind a descriptor.
__device__ __forceinline__ void wgmma(float (&sum)[TN], const unsigned (&a)[4], unsigned long long b, bool add)
{
    asm volatile(
        "{ .reg .pred add; setp.ne.b32 add, %37, 0;"
        " wgmma.mma_async.sync.aligned.m64n64k8.f32.tf32.tf32"
        " { %0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
            "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31},"
        " { %32, %33, %34, %35 }, %36, add, 1, 1; }"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]), "+f"(sum[4]), "+f"(sum[5]), "+f"(sum[6]), "+f"(sum[7]),
          "+f"(sum[8]), "+f"(sum[9]), "+f"(sum[10]), "+f"(sum[11]), "+f"(sum[12]), "+f"(sum[13]), "+f"(sum[14]), "+f"(sum[15]),
          "+f"(sum[16]), "+f"(sum[17]), "+f"(sum[18]), "+f"(sum[19]), "+f"(sum[20]), "+f"(sum[21]), "+f"(sum[22]), "+f"(sum[23]),
          "+f"(sum[24]), "+f"(sum[25]), "+f"(sum[26]), "+f"(sum[27]), "+f"(sum[28]), "+f"(sum[29]), "+f"(sum[30]), "+f"(sum[31])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
}

// Keep the compiler from moving what it does with the sums past this place: wgmma works on them meanwhile.
__device__ __forceinline__ void pin(float (&sum)[TN])
{
    #pragma unroll
    for (int i = 0; i < TN; ++i)
        asm volatile("" : "+f"(sum[i])::"memory");
}

// Let the next wgmma see registers that other instructions wrote.
__device__ __forceinline__ void wgmma_fence()
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// Close the group of instructions started since the last commit.
__device__ __forceinline__ void wgmma_commit()
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Wait until this warpgroup's instructions are done.
__device__ __forceinline__ void wgmma_wait(float (&sum)[TN])
{
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    pin(sum);
}

// Describe shared rows of 128 bytes, swizzled, eight of them every 1024 bytes, by their address.
__device__ __forceinline__ unsigned long long descriptor(unsigned rows)
{
    return 1ull << 62 | 64ull << 32 | 1ull << 16 | (rows >> 4 & 0x3fff);
}

// The other way: hi is x itself, which the tensor cores cut off, so that it need not be written; this is lo, rounded.
__device__ __forceinline__ float low_part(float x)
{
    return __uint_as_float(__float_as_uint(x - __uint_as_float(__float_as_uint(x) & 0xffffe000u)) + 0x1000u);
}

// Show what this thread wrote to shared memory to wgmma, once a barrier is passed.
__device__ __forceinline__ void fence_for_wgmma()
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
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
sgemm_3xtf32_wgmma(float alpha, const float* A, const float* B, float beta, float* C, float* workspace)
{
    wait_for_turn();
    extern __shared__ __align__(1024) float shared[];
    float* const As = shared;                           // [stages][columns][BK], swizzled
    float* const los = As + stages * As_stage;          // [splits][columns][BK], swizzled
    float* const Bs = los + splits * columns * BK;      // [stages][BK][Bs_row]
    const int thread = threadIdx.x;
    const int warp = thread / 32, lane = thread % 32;

    // k is cut into split_k parts of whole steps; all blocks of one part come before those of the next.
    constexpr int tiles = tiles_m * tiles_n;
    const int part = blockIdx.x / tiles, tile_id = blockIdx.x % tiles;
    const int first_step = part * (tiles_k / split_k) + min(part, tiles_k % split_k);
    const int steps = tiles_k / split_k + (part < tiles_k % split_k);  // of this part
    const int part_k = max(0, first_step * BK - (BK - first_k));  // where the part begins
    const int first_depth = part == 0 ? first_k : BK;  // depth of its first step
    // Blocks walk down group_m rows of tiles before they move on along n, so that blocks that run together share
    // their tiles of A and B in L2.
    constexpr int group_tiles = group_m * tiles_n;
    const int group = tile_id / group_tiles, in_group = tile_id % group_tiles;
    constexpr int group_rows = group_m;
    const int block_row = (group * group_m + in_group % group_rows) * BM;
    const int block_col = in_group / group_rows * BN;

    // A is stored along k: where a thread's first move lies in the tile, and in memory.
    using TileA = Tile<BM, BK, vec_a, lda, As_row, swizzled>;
    const int a_m = TileA::first_row(thread), a_k = TileA::first_col(thread);
    const float* a_global = A + (block_row + a_m) * lda + (part_k + a_k);

    // B is stored along n.
    using TileB = Tile<BK, BN, vec_b, ldb, Bs_row>;
    const int b_k = TileB::first_row(thread), b_n = TileB::first_col(thread);
    const float* b_global = B + (part_k + b_k) * ldb + (block_col + b_n);
    const unsigned a_shared = shared_address(As + TileA::place(a_m, a_k));
    const unsigned b_shared = shared_address(Bs + TileB::place(b_k, b_n));

    // Start copying the next tile of A and of B into buffer `stage`; they are `depth` deep, the rest is zero.
    auto load_tile = [&](int stage, int depth = BK) {
        TileA::copy(a_shared + 4 * stage * As_stage, a_global, block_row + a_m, m, depth < BK ? a_k : 0, depth);
        TileB::copy(b_shared + 4 * stage * Bs_stage, b_global, depth < BK ? b_k : 0, depth, block_col + b_n, n);
        a_global += depth;
        b_global += depth * ldb;
    };

    // A warp has 16 rows; a lane has row lane / 4 of them and that + 8, and of k lane % 4 and that + 4.
    const float* const b_lane = Bs + (warp * 16 + lane / 4) * Bs_m + lane % 4 * Bs_k;
    unsigned hi[2][slices][4], lo[2][slices][4];  // rows of two tiles, in turns: the tensor cores read them while they work
    float sums[TN];        // sums of the tensor cores over one tile: they round towards zero, so they are kept short
    float acc[1][TN] = {};  // what they were promoted to

    // Read and split this lane's rows of buffer `stage`.
    auto split_rows = [&](int half, int stage) {
        #pragma unroll
        for (int kk = 0; kk < slices; ++kk)
            #pragma unroll
            for (int q = 0; q < 4; ++q) {
                const Split b = split(b_lane[stage * Bs_stage + q % 2 * 8 * Bs_m + (kk * wgmma_k + q / 2 * 4) * Bs_k]);
                hi[half][kk][q] = b.hi, lo[half][kk][q] = b.lo;
            }
    };

    // Write the low parts of the columns in buffer `stage`; their hi are the tile itself.
    auto split_columns = [&](int to, int stage) {
        #pragma unroll
        for (int i = 0; i < columns * BK; i += num_threads * 4) {
            auto values = *reinterpret_cast<const Vector<4>*>(&As[stage * As_stage + i + thread * 4]);
            #pragma unroll
            for (int v = 0; v < 4; ++v)
                values.lane[v] = low_part(values.lane[v]);
            *reinterpret_cast<Vector<4>*>(&los[to * columns * BK + i + thread * 4]) = values;
        }
    };

    // Start to multiply a tile: small products first, so that few additions round a large sum.
    auto multiply = [&](int half, int from, int stage) {
        const unsigned long long columns_hi = descriptor(shared_address(As + stage * As_stage));
        const unsigned long long columns_lo = descriptor(shared_address(los + from * columns * BK));
        wgmma_fence();
        #pragma unroll
        for (int kk = 0; kk < slices; ++kk)
            wgmma(sums, lo[half][kk], columns_hi + 2 * kk, kk > 0);  // a slice is 32 bytes, counted in units of 16
        #pragma unroll
        for (int kk = 0; kk < slices; ++kk)
            wgmma(sums, hi[half][kk], columns_lo + 2 * kk, true);
        #pragma unroll
        for (int kk = 0; kk < slices; ++kk)
            wgmma(sums, hi[half][kk], columns_hi + 2 * kk, true);
        wgmma_commit();
    };

    // Fill every buffer but one, and split the first tile.
    #pragma unroll
    for (int stage = 0; stage < stages - 1; ++stage) {
        load_tile(stage, stage == 0 ? first_depth : BK);
        cp_async_commit();
    }
    cp_async_wait<stages - 2>();
    __syncthreads();
    split_rows(0, 0);
    split_columns(0, 0);
    cp_async_wait<stages - 3>();  // the second tile too
    fence_for_wgmma();
    __syncthreads();

    // Multiply the tile in buffer `stage`. Meanwhile start copying another to the buffer that the tile before was in
    // (`more`: there is one), and split the next tile.
    int stage = 0, vacant = stages - 1;
    auto step = [&](int half, bool more) {
        multiply(half, half, stage);
        __syncthreads();  // nobody multiplies the tile before any more
        if (more)
            load_tile(vacant);
        cp_async_commit();
        const int next = stage + 1 == stages ? 0 : stage + 1;
        split_rows(1 - half, next);
        split_columns(1 - half, next);
        cp_async_wait<stages - 3>();
        fence_for_wgmma();
        __syncthreads();  // the next tile is split, the one behind it is there
        vacant = stage;
        stage = next;
        wgmma_wait(sums);
        #pragma unroll
        for (int i = 0; i < TN; ++i)
            acc[0][i] += sums[i];
    };

    int tile = 0;
    #pragma unroll 1
    for (; tile + 2 <= steps; tile += 2) {
        step(0, tile + stages - 1 < steps);
        step(1, tile + stages - 0 < steps);
    }
    if (tile < steps)
        step(0, false);
    // The blocks that computed parts of one tile add them up through the workspace. The one that is done last does it,
    // in the order of k, so that the result does not depend on which one that is.
    constexpr int part_width = 1 * TN < 4 ? 1 * TN : 4, part_moves = 1 * TN / part_width;
    constexpr int counters = 128;  // floats before the sums: whole lines
    constexpr int partials = 3;  // sums of a tile that are kept
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
        for (int i = 0; i < 1; ++i)
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
    if (!is_last(0, split_k))
        return;
    add(0, split_k);
    // Write the lane's outputs: of each 16 rows two, 8 apart, and of each 8 columns two neighbours.
    const int c_row = block_row + lane % 4 * 2;
    const int c_col = block_col + warp * 16 + lane / 4;
    float* const c_lane = C + c_row * ldc + c_col;
    auto col_of = [](int i) { return i % 4 / 2 * 8; };
    auto row_of = [](int i) { return i / 4 * 8 + i % 2; };
    auto place = [&](int i) { return reinterpret_cast<Vector<vec_c>*>(c_lane + row_of(i) * ldc + col_of(i)); };
    auto inside = [&](int i) { return c_row + row_of(i) < m && c_col + col_of(i) < n; };
    #pragma unroll
    for (int i = 0; i < TN; i += vec_c)
        if (inside(i))
            *place(i) = output(&acc[0][i], alpha);
}
