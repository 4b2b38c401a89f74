// sgemm_3xtf32_wgmma: C[m,n] = alpha op(A)[m,k] op(B)[k,n] + beta C, float32, row-major, layout nn,
// on Hopper's tensor cores: every operand is split into two TF32 numbers, x = hi + lo, and
// a b = a_hi b_hi + a_hi b_lo + a_lo b_hi but for a_lo b_lo, which is below 2^-21 |a b|.
// architecture sm_90a, the only one with wgmma
// config   BM96-BN64-BK32-split_k1-stages4-splits3-vec_a4-vec_b4-vec_c1-guarded-group_m4-min_blocks1
// template

// The problem.
constexpr int m = 1000;  // rows of C
constexpr int n = 1000;  // columns of C
constexpr int k = 1000;  // length of a dot product
constexpr long long lda = 1000, ldb = 1000, ldc = 1000;  // floats from one stored row to the next

// The choice.
constexpr int BM = 96, BN = 64;  // block tile of C
constexpr int BK = 32;  // depth of one step along k: 128 bytes, the width of the swizzle
constexpr int stages = 4;  // shared-memory buffers
constexpr int splits = 3;  // shared-memory buffers for what is split
constexpr int vec_a = 4, vec_b = 4, vec_c = 1;  // floats per global access
constexpr int group_m = 4;  // rows of tiles worked on together
// What follows from it. An instruction multiplies rows, here of op(B) transposed, from registers by columns, of op(A) transposed, from
// shared memory, where they must lie along k, as A is stored: it makes C transposed.
constexpr int rows = BN, columns = BM;
constexpr int wgmma_m = 64, wgmma_k = 8;  // rows and depth of one instruction
constexpr int slices = BK / wgmma_k;  // of them along one step
constexpr int TN = columns / 2;  // outputs of a thread
constexpr int num_threads = 128 * (rows / wgmma_m);  // one warpgroup for each 64 rows
constexpr int tiles_m = 11, tiles_n = 16;  // block tiles of C
constexpr int tiles_k = 32;  // steps along k
constexpr int first_k = 8;  // depth of the first step: the remainder comes first, so the others need no check
constexpr int As_row = BK, Bs_row = rows + 8;  // floats from one shared row to the next; the pad avoids bank conflicts
constexpr int As_stage = columns * As_row, Bs_stage = BK * Bs_row;  // floats of one buffer
constexpr int Bs_m = 1, Bs_k = Bs_row;  // floats from one element to the next along rows, along k

static_assert(BK == 32, "a shared row is as wide as the swizzle");
static_assert(rows % wgmma_m == 0 && columns % 8 == 0 && columns <= 256, "whole instructions fill the block tile");
static_assert(num_threads <= 1024, "a block has at most 1024 threads");
static_assert((BM * BK / vec_a) % num_threads == 0, "every thread copies the same share of A's tile");
static_assert((BN * BK / vec_b) % num_threads == 0, "every thread copies the same share of B's tile");
static_assert(num_threads == 128 || num_threads == 256, "the rows of a thread's copies differ from its first in bits of their own");
static_assert(columns * BK % (4 * num_threads) == 0, "every thread splits the same share of the columns");
static_assert(lda % vec_a == 0 && ldb % vec_b == 0 && ldc % vec_c == 0, "vectors are aligned in every row");

// `width` floats that move in one instruction.
template <int width>
struct alignas(4 * width) Vector {
    float lane[width];
};

__device__ __forceinline__ unsigned shared_address(const float* pointer)
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

// The other way: hi is x itself, which the tensor cores cut off, so that it need not be written; this is lo, rounded.
__device__ __forceinline__ float low_part(float x)
{
    return __uint_as_float(__float_as_uint(x - __uint_as_float(__float_as_uint(x) & 0xffffe000u)) + 0x1000u);
}

// Start sum[64,columns] = a[64,8] b[8,columns] + (add ? sum : 0) by a warpgroup: a in each lane's registers as the PTX
// ISA numbers them, b in shared memory behind a descriptor.
__device__ __forceinline__ void wgmma(float (&sum)[48], const unsigned (&a)[4], unsigned long long b, bool add)
{
    asm volatile(
        "{ .reg .pred add; setp.ne.b32 add, %53, 0;"
        " wgmma.mma_async.sync.aligned.m64n96k8.f32.tf32.tf32"
        " { %0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
            "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
            "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47},"
        " { %48, %49, %50, %51 }, %52, add, 1, 1; }"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]), "+f"(sum[4]), "+f"(sum[5]), "+f"(sum[6]), "+f"(sum[7]),
          "+f"(sum[8]), "+f"(sum[9]), "+f"(sum[10]), "+f"(sum[11]), "+f"(sum[12]), "+f"(sum[13]), "+f"(sum[14]), "+f"(sum[15]),
          "+f"(sum[16]), "+f"(sum[17]), "+f"(sum[18]), "+f"(sum[19]), "+f"(sum[20]), "+f"(sum[21]), "+f"(sum[22]), "+f"(sum[23]),
          "+f"(sum[24]), "+f"(sum[25]), "+f"(sum[26]), "+f"(sum[27]), "+f"(sum[28]), "+f"(sum[29]), "+f"(sum[30]), "+f"(sum[31]),
          "+f"(sum[32]), "+f"(sum[33]), "+f"(sum[34]), "+f"(sum[35]), "+f"(sum[36]), "+f"(sum[37]), "+f"(sum[38]), "+f"(sum[39]),
          "+f"(sum[40]), "+f"(sum[41]), "+f"(sum[42]), "+f"(sum[43]), "+f"(sum[44]), "+f"(sum[45]), "+f"(sum[46]), "+f"(sum[47])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
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
__device__ __forceinline__ void wgmma_wait(float (&sum)[48])
{
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    #pragma unroll
    for (int i = 0; i < 48; ++i)
        asm volatile("" : "+f"(sum[i])::"memory");  // the sums are not read before
}

// Describe shared rows of 128 bytes, swizzled, eight of them every 1024 bytes.
__device__ __forceinline__ unsigned long long descriptor(const float* rows)
{
    return 1ull << 62 | 64ull << 32 | 1ull << 16 | (shared_address(rows) >> 4 & 0x3fff);
}

// Show what this thread wrote to shared memory to wgmma, once a barrier is passed.
__device__ __forceinline__ void fence_for_wgmma()
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

extern "C" __global__ void __launch_bounds__(num_threads, 1)
sgemm_3xtf32_wgmma(float alpha, const float* __restrict__ A, const float* __restrict__ B, float beta, float* __restrict__ C)
{
    extern __shared__ __align__(1024) float shared[];
    float* const As = shared;                           // [stages][columns][BK], swizzled
    float* const los = As + stages * As_stage;          // [splits][columns][BK], swizzled
    float* const Bs = los + splits * columns * BK;      // [stages][BK][Bs_row]
    const int thread = threadIdx.x;
    const int warp = thread / 32, lane = thread % 32;

    // Blocks walk down group_m rows of tiles before they move on along n, so that blocks that run together share
    // their tiles of A and B in L2.
    constexpr int group_tiles = group_m * tiles_n;
    const int group = blockIdx.x / group_tiles, in_group = blockIdx.x % group_tiles;
    const int group_rows = min(group_m, tiles_m - group * group_m);
    const int block_row = (group * group_m + in_group % group_rows) * BM;
    const int block_col = in_group / group_rows * BN;

    // A: the tile is BM stored rows of BK floats, moved vec_a at a time.
    constexpr int a_width = BK / vec_a;  // moves along one stored row
    constexpr int a_moves = BM * BK / vec_a / num_threads;  // moves of one thread
    constexpr int a_rows = num_threads / a_width;  // stored rows between a thread's moves
    const int a_row = thread / a_width, a_col = thread % a_width * vec_a;
    const float* a_global = A + (block_row + a_row) * lda + a_col;

    // B: the tile is BK stored rows of BN floats, moved vec_b at a time.
    constexpr int b_width = BN / vec_b;  // moves along one stored row
    constexpr int b_moves = BN * BK / vec_b / num_threads;  // moves of one thread
    constexpr int b_rows = num_threads / b_width;  // stored rows between a thread's moves
    const int b_row = thread / b_width, b_col = thread % b_width * vec_b;
    const float* b_global = B + b_row * ldb + (block_col + b_col);

    const unsigned a_shared = shared_address(As + a_row * As_row + (a_col ^ a_row % 8 * 4));
    const unsigned b_shared = shared_address(Bs + b_row * Bs_row + b_col);

    // Start copying the next tile of A and of B into buffer `stage`; they are `depth` deep, the rest is zero.
    auto load_tile = [&](int stage, int depth = BK) {
        #pragma unroll
        for (int i = 0; i < a_moves; ++i) {
            const int row = i * a_rows, col = 0;
            const bool inside = block_row + a_row + row < m && a_col + col < depth;
            cp_async<4 * vec_a>((a_shared + 4 * (stage * As_stage + row * As_row + col)) ^ row % 8 * 16, a_global + row * lda + col, inside);
        }
        #pragma unroll
        for (int i = 0; i < b_moves; ++i) {
            const int row = i * b_rows, col = 0;
            const bool inside = block_col + b_col + col < n && b_row + row < depth;
            cp_async<4 * vec_b>(b_shared + 4 * (stage * Bs_stage + row * Bs_row + col), b_global + row * ldb + col, inside);
        }
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
        const unsigned long long columns_hi = descriptor(&As[stage * As_stage]);
        const unsigned long long columns_lo = descriptor(&los[from * columns * BK]);
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

    // Fill every buffer but two, and split the first tile.
    #pragma unroll
    for (int stage = 0; stage < stages - 2; ++stage) {
        load_tile(stage, stage == 0 ? first_k : BK);
        cp_async_commit();
    }
    cp_async_wait<stages - 3>();
    __syncthreads();
    split_rows(0, 0);
    split_columns(0, 0);
    cp_async_wait<stages - 4>();  // the second tile too
    fence_for_wgmma();
    __syncthreads();

    // Multiply the tile in buffer `stage`. Meanwhile start copying another to the buffer of the tile before the last,
    // which nobody multiplies any more (`more`: there is one), and split the next tile.
    int stage = 0, vacant = stages - 2, from = 0;
    auto step = [&](int half, bool more) {
        multiply(half, from, stage);
        if (more)
            load_tile(vacant);
        cp_async_commit();
        const int next = stage + 1 == stages ? 0 : stage + 1, to = from + 1 == splits ? 0 : from + 1;
        split_rows(1 - half, next);
        split_columns(to, next);
        cp_async_wait<stages - 4>();
        fence_for_wgmma();
        __syncthreads();  // the next tile is split, the one behind it is there
        vacant = vacant + 1 == stages ? 0 : vacant + 1;
        stage = next;
        from = to;
        wgmma_wait(sums);
        #pragma unroll
        for (int i = 0; i < TN; ++i)
            acc[0][i] += sums[i];
    };

    int tile = 0;
    #pragma unroll 1
    for (; tile + 2 <= tiles_k; tile += 2) {
        step(0, tile + stages - 2 < tiles_k);
        step(1, tile + stages - 1 < tiles_k);
    }
    // Write the lane's outputs: of each 16 rows two, 8 apart, and of each 8 columns two neighbours.
    const int c_row = block_row + lane % 4 * 2;
    const int c_col = block_col + warp * 16 + lane / 4;
    float* const c_lane = C + c_row * ldc + c_col;
    // All of C is read before any of it is written: a read behind a write waits for it.
    Vector<vec_c> old[TN / vec_c] = {};
    if (beta != 0.0f) {  // C is not read otherwise: it may hold NaN
        #pragma unroll
        for (int i = 0; i < TN; i += vec_c) {
            const int col = i % 4 / 2 * 8, row = i / 4 * 8 + i % 2;
            if (c_row + row >= m || c_col + col >= n)
                continue;
            old[i / vec_c] = *reinterpret_cast<Vector<vec_c>*>(c_lane + row * ldc + col);
        }
    }
    __syncwarp();  // else the compiler lets the reads sink to the writes, to save registers
    #pragma unroll
    for (int i = 0; i < TN; i += vec_c) {
        const int col = i % 4 / 2 * 8, row = i / 4 * 8 + i % 2;
        if (c_row + row >= m || c_col + col >= n)
            continue;
        auto* const to = reinterpret_cast<Vector<vec_c>*>(c_lane + row * ldc + col);
        Vector<vec_c> out;
        #pragma unroll
        for (int v = 0; v < vec_c; ++v)
            out.lane[v] = alpha * acc[0][i + v] + beta * old[i / vec_c].lane[v];
        *to = out;
    }
}
