// sgemm_3xfp16_wgmma: C[m,n] = alpha op(A)[m,k] op(B)[k,n] + beta C, float32, row-major, layout tt,
// on Hopper's tensor cores: rows of op(A) and columns of op(B) are scaled by powers of two and split into two FP16
// numbers, x = hi + lo, and a b = a_hi b_hi + a_hi b_lo + a_lo b_hi but for a_lo b_lo, which is below 2^-22 |a b|.
// architecture sm_90a, the only one with wgmma
// config   BM64-BN128-stages4-promote32-vec_c1-guarded-group_m16
// template

// The problem.
constexpr int m = 1000;  // rows of C
constexpr int n = 1003;  // columns of C
constexpr int k = 1001;  // length of a dot product
constexpr long long lda = 1000, ldb = 1001, ldc = 1003;  // floats from one stored row to the next

// The choice.
constexpr int BM = 64, BN = 128;  // block tile of C
constexpr int stages = 4;  // shared-memory buffers
constexpr int promote = 32;  // length along k after which a tensor-core sum moves to FP32 registers
constexpr int vec_c = 1;  // floats per global access of C
constexpr int group_m = 16;  // rows of tiles worked on together

// What follows from it.
constexpr int BK = 64;  // depth of one step along k: 128 bytes of FP16, the width of the swizzle
constexpr int wgmma_m = 64, wgmma_k = 16;  // rows and depth of one instruction
constexpr int TN = BN / 2;  // outputs of a thread
constexpr int warpgroups = BM / wgmma_m;  // that multiply, each 64 rows; one more fetches
constexpr int num_threads = 128 * (warpgroups + 1);
constexpr int tiles_m = 16, tiles_n = 8;  // block tiles of C
constexpr int tiles_k = 16;  // steps along k
constexpr int slice_k = 512;  // length along k that is scanned, and split, by one block
constexpr int slices = 2;

static_assert(BM % wgmma_m == 0 && BN % 8 == 0 && BN <= 256, "whole instructions fill the block tile");
static_assert(BK % promote == 0 && promote % wgmma_k == 0, "sums are promoted at the same places of every step");
static_assert(num_threads <= 1024, "a block has at most 1024 threads");
static_assert(ldc % vec_c == 0 && n % vec_c == 0, "vectors of C are aligned in every row");

// `width` floats that move in one instruction.
template <int width>
struct alignas(4 * width) Vector {
    float lane[width];
};

// From compute capability 9.0 on a kernel is launched when the blocks of the one before it have ended (programmatic dependent
// launch), which may be before their writes are seen: so it waits for that first.
__device__ __forceinline__ void wait_for_turn()
{
    #if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    #endif
}

// What was found out about the rows of an operand in one slice of k, scaled so that the largest element of a row is in
// [2^14, 2^15). An element is large from 2^9 on. It is lost where lo, which ends at 2^-24, cannot hold what hi leaves: below
// 2^-2.
struct Range {
    int not_large;  // most elements of a row that are not large; rows of zeros do not count, they are exact
    int lost;       // most elements of a row that are lost
};

constexpr float large = 512.0f, least_whole = 0.25f;

// An operand as the product reads it. Its rows are those of op(A), or the columns of op(B); both run along k. `tile` rows
// of BK elements are a block, hi before lo, in which a row is 128 bytes and its 16-byte pieces are swizzled as wgmma wants
// them. Rows and steps that the operand lacks are zeros, so the product knows neither layouts nor edges.
template <int rows_, int tile_>
struct Operand {
    static constexpr int rows = rows_, tile = tile_;
    static constexpr int padded = (rows + tile - 1) / tile * tile;  // rows, with those that the last tile lacks
    static constexpr int part_bytes = tile * BK * 2;  // all hi of a block, or all lo
    static constexpr int block_bytes = 2 * part_bytes;
    static constexpr long long maxima_at = 8 * slices;  // behind the ranges
    static constexpr long long shifts_at = maxima_at + 4LL * slices * padded;
    static constexpr long long blocks_at = (shifts_at + 4LL * padded + 255) / 256 * 256;
    static constexpr long long bytes = blocks_at + (long long)padded / tile * tiles_k * block_bytes;

    unsigned char* place;

    __device__ Range& range(int slice) const { return reinterpret_cast<Range*>(place)[slice]; }

    // The bits of the largest magnitude of row r in a slice of k.
    __device__ unsigned& maximum(int slice, int r) const
    {
        return reinterpret_cast<unsigned*>(place + maxima_at)[(long long)slice * padded + r];
    }

    // Row r is multiplied by 2 to this power.
    __device__ int& shift(int r) const { return reinterpret_cast<int*>(place + shifts_at)[r]; }

    // The block of a tile at a step along k.
    __device__ unsigned char* block(int tile_id, int step) const
    {
        return place + blocks_at + ((long long)tile_id * tiles_k + step) * block_bytes;
    }

    // The hi of four elements from l on of row r; their lo lie part_bytes behind.
    __device__ unsigned char* quad(int r, int l) const
    {
        const int unit = l % BK / 8 ^ r % 8;
        return block(r / tile, l / BK) + r % tile * (BK * 2) + unit * 16 + l % 8 * 2;
    }
};

using OperandA = Operand<m, BM>;
using OperandB = Operand<n, BN>;

__device__ __forceinline__ OperandA operand_a(float* workspace)
{
    return {reinterpret_cast<unsigned char*>(workspace)};
}

__device__ __forceinline__ OperandB operand_b(float* workspace)
{
    return {operand_a(workspace).place + OperandA::bytes};
}

// x 2^shift, for -252 <= shift <= 254: such a power is no float, but a product of two.
__device__ __forceinline__ float scaled(float x, int shift)
{
    const int half = shift >> 1;
    return x * __int_as_float((half + 127) << 23) * __int_as_float((shift - half + 127) << 23);
}

// Whether the product keeps its bound: what is lost adds less than 2^-24 |A||B| to the error of any element of C.
// A lost element errs by 2^-25 at most, times a factor below 2^15. Of the k products of an element of C at least `common`
// have two large factors, and are 2^18 or more: so 2^-10 lost <= 2^-24 2^18 common must hold. All lanes of a warp ask.
__device__ __forceinline__ bool in_range(float* workspace)
{
    const OperandA a = operand_a(workspace);
    const OperandB b = operand_b(workspace);
    int lost = 0, common = 0;
    for (int slice = threadIdx.x % 32; slice < slices; slice += 32) {
        const Range of_a = a.range(slice), of_b = b.range(slice);
        lost += of_a.lost + of_b.lost;
        common += max(0, min(slice_k, k - slice * slice_k) - of_a.not_large - of_b.not_large);
    }
    lost = __reduce_add_sync(~0u, lost);
    common = __reduce_add_sync(~0u, common);
    return lost == 0 || lost <= 16 * common;
}

constexpr int split_threads = 256, panel_rows = 64;  // a block of `scan` and `split` takes a panel of rows in a slice of k

__device__ __forceinline__ unsigned magnitude(float x)
{
    return __float_as_uint(x) & 0x7fffffffu;
}

// The power of two that brings a magnitude, given by its bits, into [2^14, 2^15), as FP16 ends at 2^16; 0 for zero, infinity
// and NaN.
__device__ __forceinline__ int shift_for(unsigned bits)
{
    if (bits == 0 || bits >= 0x7f800000u)
        return 0;
    return 14 - (bits >> 23 ? static_cast<int>(bits >> 23) - 127 : 31 - __clz(bits) - 149);
}

// Round two numbers to FP16, the first in the lower half.
__device__ __forceinline__ unsigned halves(float first, float second)
{
    unsigned pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
}

// The lower half of a pair as a float.
__device__ __forceinline__ float lower(unsigned pair)
{
    float x;
    asm("{ .reg .b16 low, high; mov.b32 { low, high }, %1; cvt.f32.f16 %0, low; }" : "=f"(x) : "r"(pair));
    return x;
}

// Four elements of an operand as it is stored that lie side by side, from element l of row r on: along k, or of four rows.
// Zeros where there are none.
template <int rows, bool along_k, long long lead, bool aligned>
__device__ __forceinline__ Vector<4> four(const float* __restrict__ stored, int r, int l)
{
    Vector<4> found = {};
    if constexpr (aligned) {
        if (along_k ? r < rows && l + 3 < k : r + 3 < rows && l < k)
            return *reinterpret_cast<const Vector<4>*>(&stored[along_k ? r * lead + l : l * lead + r]);
        if constexpr ((along_k ? k : rows) % 4 == 0)
            return found;
    }
    #pragma unroll
    for (int v = 0; v < 4; ++v) {
        const int row = along_k ? r : r + v, at = along_k ? l + v : l;
        found.lane[v] = row < rows && at < k ? stored[along_k ? row * lead + at : at * lead + row] : 0.0f;
    }
    return found;
}

// Find the largest magnitude of each row of a panel in a slice of k.
template <bool along_k, long long lead, bool aligned, typename To>
__device__ __forceinline__ void scan(const float* __restrict__ stored, To to, int panel, int slice)
{
    const int thread = threadIdx.x, inner = thread % 16, outer = thread / 16;
    const int first_row = panel * panel_rows, start = slice * slice_k, end = min(start + slice_k, k);
    if (panel == 0 && thread == 0)
        to.range(slice) = {0, 0};
    if constexpr (along_k) {
        #pragma unroll 1
        for (int i = 0; i < panel_rows; i += 16) {
            const int r = first_row + i + outer;
            unsigned top = 0;
            #pragma unroll 8
            for (int l = start + inner * 4; l < end; l += 64) {
                const Vector<4> x = four<To::rows, along_k, lead, aligned>(stored, r, l);
                #pragma unroll
                for (int v = 0; v < 4; ++v)
                    top = max(top, magnitude(x.lane[v]));
            }
            #pragma unroll
            for (int apart = 8; apart > 0; apart /= 2)
                top = max(top, __shfl_xor_sync(~0u, top, apart));
            if (inner == 0 && r < To::padded)
                to.maximum(slice, r) = top;
        }
    } else {
        __shared__ unsigned tops[16][panel_rows];
        unsigned top[4] = {};
        #pragma unroll 8
        for (int l = start + outer; l < end; l += 16) {
            const Vector<4> x = four<To::rows, along_k, lead, aligned>(stored, first_row + inner * 4, l);
            #pragma unroll
            for (int v = 0; v < 4; ++v)
                top[v] = max(top[v], magnitude(x.lane[v]));
        }
        #pragma unroll
        for (int v = 0; v < 4; ++v)
            tops[outer][inner * 4 + v] = top[v];
        __syncthreads();
        if (thread < panel_rows && first_row + thread < To::padded) {
            unsigned most = 0;
            #pragma unroll
            for (int i = 0; i < 16; ++i)
                most = max(most, tops[i][thread]);
            to.maximum(slice, first_row + thread) = most;
        }
    }
}

// Scale and split a panel of rows in a slice of k, and find out its range.
template <bool along_k, long long lead, bool aligned, typename To>
__device__ __forceinline__ void split(const float* __restrict__ stored, To to, int panel, int slice)
{
    __shared__ unsigned tops[panel_rows];
    __shared__ Range found;
    __shared__ float turned[along_k ? 1 : BK][panel_rows + 1];
    const int thread = threadIdx.x, inner = thread % 16, outer = thread / 16;
    const int first_row = panel * panel_rows, start = slice * slice_k, end = min(start + slice_k, tiles_k * BK);
    if (thread == 0)
        found = {0, 0};
    if (thread < panel_rows) {
        const int r = first_row + thread;
        unsigned top = 0;
        if (r < To::padded)
            for (int each = 0; each < slices; ++each)
                top = max(top, to.maximum(each, r));
        tops[thread] = top;
        if (slice == 0 && r < To::padded)
            to.shift(r) = shift_for(top);
    }
    __syncthreads();

    int large_ones[4] = {}, lost_ones[4] = {};  // of this thread's share of four rows
    #pragma unroll 1
    for (int l = start; l < end; l += BK) {
        Vector<4> x[4];
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int r = along_k ? outer + 16 * i : inner * 4, at = along_k ? inner * 4 : outer + 16 * i;
            x[i] = four<To::rows, along_k, lead, aligned>(stored, first_row + r, l + at);
        }
        if constexpr (!along_k) {
            __syncthreads();
            #pragma unroll
            for (int i = 0; i < 4; ++i)
                #pragma unroll
                for (int v = 0; v < 4; ++v)
                    turned[outer + 16 * i][inner * 4 + v] = x[i].lane[v];
            __syncthreads();
            #pragma unroll
            for (int i = 0; i < 4; ++i)
                #pragma unroll
                for (int v = 0; v < 4; ++v)
                    x[i].lane[v] = turned[inner * 4 + v][outer + 16 * i];
        }
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int r = first_row + outer + 16 * i, shift = shift_for(tops[outer + 16 * i]);
            unsigned hi[2], lo[2];
            #pragma unroll
            for (int pair = 0; pair < 2; ++pair) {
                const float first = scaled(x[i].lane[2 * pair], shift), second = scaled(x[i].lane[2 * pair + 1], shift);
                hi[pair] = halves(first, second);
                lo[pair] = halves(first - lower(hi[pair]), second - lower(hi[pair] >> 16));
                #pragma unroll
                for (int v = 0; v < 2; ++v) {
                    const float y = v ? second : first, sum = lower(hi[pair] >> 16 * v) + lower(lo[pair] >> 16 * v);
                    large_ones[i] += fabsf(y) >= large;
                    lost_ones[i] += fabsf(y) < least_whole && (sum != y || (y == 0.0f && x[i].lane[2 * pair + v] != 0.0f));
                }
            }
            if (r < To::padded) {
                unsigned char* const quad = to.quad(r, l + inner * 4);
                *reinterpret_cast<uint2*>(quad) = make_uint2(hi[0], hi[1]);
                *reinterpret_cast<uint2*>(quad + To::part_bytes) = make_uint2(lo[0], lo[1]);
            }
        }
    }

    const int length = min(start + slice_k, k) - start;
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
        #pragma unroll
        for (int apart = 8; apart > 0; apart /= 2) {
            large_ones[i] += __shfl_xor_sync(~0u, large_ones[i], apart);
            lost_ones[i] += __shfl_xor_sync(~0u, lost_ones[i], apart);
        }
        const unsigned top = tops[outer + 16 * i];
        const bool finite = top < 0x7f800000u;  // else nothing of the row is sure
        if (inner == 0 && top != 0) {
            atomicMax(&found.not_large, finite ? length - large_ones[i] : length);
            atomicMax(&found.lost, finite ? lost_ones[i] : 1);
        }
    }
    __syncthreads();
    if (thread == 0) {
        atomicMax(&to.range(slice).not_large, found.not_large);
        if (found.lost > 0)
            atomicMax(&to.range(slice).lost, found.lost);
    }
}

constexpr int panels_a = (OperandA::padded + panel_rows - 1) / panel_rows;

// Scan both operands.
extern "C" __global__ void __launch_bounds__(split_threads) scan_operands(const float* A, const float* B, float* workspace)
{
    wait_for_turn();
    const int panel = blockIdx.x / slices, slice = blockIdx.x % slices;
    if (panel < panels_a)
        scan<false, lda, true>(A, operand_a(workspace), panel, slice);
    else
        scan<true, ldb, false>(B, operand_b(workspace), panel - panels_a, slice);
}

// Split them, last part first: that is what the scan has left in L2.
extern "C" __global__ void __launch_bounds__(split_threads) split_operands(const float* A, const float* B, float* workspace)
{
    wait_for_turn();
    const int block = gridDim.x - 1 - blockIdx.x, panel = block / slices, slice = block % slices;
    if (panel < panels_a)
        split<false, lda, true>(A, operand_a(workspace), panel, slice);
    else
        split<true, ldb, false>(B, operand_b(workspace), panel - panels_a, slice);
}

// The kernel that computes what is out of range. It returns at once where nothing is.
namespace fallback {
// sgemm_3xtf32_wgmma: C[m,n] = alpha op(A)[m,k] op(B)[k,n] + beta C, float32, row-major, layout tt,
// on Hopper's tensor cores: every operand is split into two TF32 numbers, x = hi + lo, and
// a b = a_hi b_hi + a_hi b_lo + a_lo b_hi but for a_lo b_lo, which is below 2^-21 |a b|.
// architecture sm_90a, the only one with wgmma
// config   BM128-BN128-BK32-split_k1-stages5-splits3-vec_a4-vec_b1-vec_c1-guarded-group_m8-min_blocks1
// template

// The problem.
constexpr int m = 1000;  // rows of C
constexpr int n = 1003;  // columns of C
constexpr int k = 1001;  // length of a dot product
constexpr long long lda = 1000, ldb = 1001, ldc = 1003;  // floats from one stored row to the next

// The choice.
constexpr int BM = 128, BN = 128;  // block tile of C
constexpr int BK = 32;  // depth of one step along k: 128 bytes, the width of the swizzle
constexpr int stages = 5;  // shared-memory buffers
constexpr int splits = 3;  // shared-memory buffers for what is split
constexpr int vec_a = 4, vec_b = 1, vec_c = 1;  // floats per global access
constexpr int group_m = 8;  // rows of tiles worked on together
// What follows from it. An instruction multiplies rows, here of op(A), from registers by columns, of op(B), from
// shared memory, where they must lie along k, as B is stored.
constexpr int rows = BM, columns = BN;
constexpr int wgmma_m = 64, wgmma_k = 8;  // rows and depth of one instruction
constexpr int slices = BK / wgmma_k;  // of them along one step
constexpr int TN = columns / 2;  // outputs of a thread
constexpr int num_threads = 128 * (rows / wgmma_m);  // one warpgroup for each 64 rows
constexpr int tiles_m = 8, tiles_n = 8;  // block tiles of C
constexpr int tiles_k = 32;  // steps along k
constexpr int first_k = 9;  // depth of the first step: the remainder comes first, so the others need no check
constexpr int Bs_row = BK, As_row = rows + 8;  // floats from one shared row to the next; the pad avoids bank conflicts
constexpr int Bs_stage = columns * Bs_row, As_stage = BK * As_row;  // floats of one buffer
constexpr int As_m = 1, As_k = As_row;  // floats from one element to the next along rows, along k

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

// Start sum[64,128] = a[64,8] b[8,128] + (add ? sum : 0) by a warpgroup: a in each lane's registers as the PTX ISA numbers them,
// b in shared memory behind a descriptor.
__device__ __forceinline__ void wgmma(float (&sum)[TN], const unsigned (&a)[4], unsigned long long b, bool add)
{
    asm volatile(
        "{ .reg .pred add; setp.ne.b32 add, %69, 0;"
        " wgmma.mma_async.sync.aligned.m64n128k8.f32.tf32.tf32"
        " { %0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
            "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
            "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
            "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63},"
        " { %64, %65, %66, %67 }, %68, add, 1, 1; }"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]), "+f"(sum[4]), "+f"(sum[5]), "+f"(sum[6]), "+f"(sum[7]),
          "+f"(sum[8]), "+f"(sum[9]), "+f"(sum[10]), "+f"(sum[11]), "+f"(sum[12]), "+f"(sum[13]), "+f"(sum[14]), "+f"(sum[15]),
          "+f"(sum[16]), "+f"(sum[17]), "+f"(sum[18]), "+f"(sum[19]), "+f"(sum[20]), "+f"(sum[21]), "+f"(sum[22]), "+f"(sum[23]),
          "+f"(sum[24]), "+f"(sum[25]), "+f"(sum[26]), "+f"(sum[27]), "+f"(sum[28]), "+f"(sum[29]), "+f"(sum[30]), "+f"(sum[31]),
          "+f"(sum[32]), "+f"(sum[33]), "+f"(sum[34]), "+f"(sum[35]), "+f"(sum[36]), "+f"(sum[37]), "+f"(sum[38]), "+f"(sum[39]),
          "+f"(sum[40]), "+f"(sum[41]), "+f"(sum[42]), "+f"(sum[43]), "+f"(sum[44]), "+f"(sum[45]), "+f"(sum[46]), "+f"(sum[47]),
          "+f"(sum[48]), "+f"(sum[49]), "+f"(sum[50]), "+f"(sum[51]), "+f"(sum[52]), "+f"(sum[53]), "+f"(sum[54]), "+f"(sum[55]),
          "+f"(sum[56]), "+f"(sum[57]), "+f"(sum[58]), "+f"(sum[59]), "+f"(sum[60]), "+f"(sum[61]), "+f"(sum[62]), "+f"(sum[63])
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
sgemm_3xtf32_wgmma(float alpha, const float* A, const float* B, float beta, float* C,
    float* workspace)
{
    wait_for_turn();
    if (in_range(workspace))
        return;  // nothing is left to this kernel

    extern __shared__ __align__(1024) float shared[];
    float* const Bs = shared;                           // [stages][columns][BK], swizzled
    float* const los = Bs + stages * Bs_stage;          // [splits][columns][BK], swizzled
    float* const As = los + splits * columns * BK;      // [stages][BK][As_row]
    const int thread = threadIdx.x;
    const int warp = thread / 32, lane = thread % 32;

    // Blocks walk down group_m rows of tiles before they move on along n, so that blocks that run together share
    // their tiles of A and B in L2.
    constexpr int group_tiles = group_m * tiles_n;
    const int group = blockIdx.x / group_tiles, in_group = blockIdx.x % group_tiles;
    constexpr int group_rows = group_m;
    const int block_row = (group * group_m + in_group % group_rows) * BM;
    const int block_col = in_group / group_rows * BN;

    // A is stored along m: where a thread's first move lies in the tile, and in memory.
    using TileA = Tile<BK, BM, vec_a, lda, As_row>;
    const int a_k = TileA::first_row(thread), a_m = TileA::first_col(thread);
    const float* a_global = A + a_k * lda + (block_row + a_m);

    // B is stored along k.
    using TileB = Tile<BN, BK, vec_b, ldb, Bs_row, swizzled>;
    const int b_n = TileB::first_row(thread), b_k = TileB::first_col(thread);
    const float* b_global = B + (block_col + b_n) * ldb + b_k;
    const unsigned a_shared = shared_address(As + TileA::place(a_k, a_m));
    const unsigned b_shared = shared_address(Bs + TileB::place(b_n, b_k));

    // Start copying the next tile of A and of B into buffer `stage`; they are `depth` deep, the rest is zero.
    auto load_tile = [&](int stage, int depth = BK) {
        TileA::copy(a_shared + 4 * stage * As_stage, a_global, depth < BK ? a_k : 0, depth, block_row + a_m, m);
        TileB::copy(b_shared + 4 * stage * Bs_stage, b_global, block_col + b_n, n, depth < BK ? b_k : 0, depth);
        a_global += depth * lda;
        b_global += depth;
    };

    // A warp has 16 rows; a lane has row lane / 4 of them and that + 8, and of k lane % 4 and that + 4.
    const float* const a_lane = As + (warp * 16 + lane / 4) * As_m + lane % 4 * As_k;
    unsigned hi[2][slices][4], lo[2][slices][4];  // rows of two tiles, in turns: the tensor cores read them while they work
    float sums[TN];        // sums of the tensor cores over one tile: they round towards zero, so they are kept short
    float acc[1][TN] = {};  // what they were promoted to

    // Read and split this lane's rows of buffer `stage`.
    auto split_rows = [&](int half, int stage) {
        #pragma unroll
        for (int kk = 0; kk < slices; ++kk)
            #pragma unroll
            for (int q = 0; q < 4; ++q) {
                const Split a = split(a_lane[stage * As_stage + q % 2 * 8 * As_m + (kk * wgmma_k + q / 2 * 4) * As_k]);
                hi[half][kk][q] = a.hi, lo[half][kk][q] = a.lo;
            }
    };

    // Write the low parts of the columns in buffer `stage`; their hi are the tile itself.
    auto split_columns = [&](int to, int stage) {
        #pragma unroll
        for (int i = 0; i < columns * BK; i += num_threads * 4) {
            auto values = *reinterpret_cast<const Vector<4>*>(&Bs[stage * Bs_stage + i + thread * 4]);
            #pragma unroll
            for (int v = 0; v < 4; ++v)
                values.lane[v] = low_part(values.lane[v]);
            *reinterpret_cast<Vector<4>*>(&los[to * columns * BK + i + thread * 4]) = values;
        }
    };

    // Start to multiply a tile: small products first, so that few additions round a large sum.
    auto multiply = [&](int half, int from, int stage) {
        const unsigned long long columns_hi = descriptor(shared_address(Bs + stage * Bs_stage));
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
    const int c_row = block_row + warp * 16 + lane / 4;
    const int c_col = block_col + lane % 4 * 2;
    float* const c_lane = C + c_row * ldc + c_col;
    auto row_of = [](int i) { return i % 4 / 2 * 8; };
    auto col_of = [](int i) { return i / 4 * 8 + i % 2; };
    auto place = [&](int i) { return reinterpret_cast<Vector<vec_c>*>(c_lane + row_of(i) * ldc + col_of(i)); };
    auto inside = [&](int i) { return c_row + row_of(i) < m && c_col + col_of(i) < n; };
    // All of C is read before any of it is written: a read behind a write waits for it.
    Vector<vec_c> old[TN / vec_c] = {};
    if (beta != 0.0f)  // C is not read otherwise: it may hold NaN
        #pragma unroll
        for (int i = 0; i < TN; i += vec_c)
            if (inside(i))
                old[i / vec_c] = *place(i);
    __syncwarp();  // else the compiler lets the reads sink to the writes, to save registers
    #pragma unroll
    for (int i = 0; i < TN; i += vec_c)
        if (inside(i))
            *place(i) = output(&acc[0][i], alpha, beta, old[i / vec_c]);
}
}  // namespace fallback

using fallback::sgemm_3xtf32_wgmma;

__device__ __forceinline__ unsigned shared_address(const void* pointer)
{
    return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// A barrier in shared memory, by its address: a phase is complete when `arrivals` threads have arrived, and the bytes that
// one of them said to expect.
__device__ __forceinline__ void barrier_init(unsigned barrier, int arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void arrive(unsigned barrier)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void arrive_expecting(unsigned barrier, int bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Wait for the end of a phase with this parity.
__device__ __forceinline__ void wait(unsigned barrier, unsigned parity)
{
    int done = 0;
    while (!done)
        asm volatile("{ .reg .pred done; mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2; selp.b32 %0, 1, 0, done; }"
                     : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
}

// Start copying whole 16 bytes from global to shared memory; they arrive at a barrier.
__device__ __forceinline__ void copy(unsigned to, const unsigned char* from, int bytes, unsigned barrier)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

// Hand over registers that a warpgroup does not need, or take them.
template <int registers>
__device__ __forceinline__ void lower_registers()
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}

template <int registers>
__device__ __forceinline__ void raise_registers()
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}

// Start sum[64,128] = a[64,16] b[16,128] + (add ? sum : 0) by a warpgroup: both in shared memory, behind descriptors.
__device__ __forceinline__ void wgmma(float (&sum)[TN], unsigned long long a, unsigned long long b, bool add)
{
    asm volatile(
        "{ .reg .pred add; setp.ne.b32 add, %66, 0;"
        " wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16"
        " { %0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
            "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
            "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
            "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63},"
        " %64, %65, add, 1, 1, 0, 0; }"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]), "+f"(sum[4]), "+f"(sum[5]), "+f"(sum[6]), "+f"(sum[7]),
          "+f"(sum[8]), "+f"(sum[9]), "+f"(sum[10]), "+f"(sum[11]), "+f"(sum[12]), "+f"(sum[13]), "+f"(sum[14]), "+f"(sum[15]),
          "+f"(sum[16]), "+f"(sum[17]), "+f"(sum[18]), "+f"(sum[19]), "+f"(sum[20]), "+f"(sum[21]), "+f"(sum[22]), "+f"(sum[23]),
          "+f"(sum[24]), "+f"(sum[25]), "+f"(sum[26]), "+f"(sum[27]), "+f"(sum[28]), "+f"(sum[29]), "+f"(sum[30]), "+f"(sum[31]),
          "+f"(sum[32]), "+f"(sum[33]), "+f"(sum[34]), "+f"(sum[35]), "+f"(sum[36]), "+f"(sum[37]), "+f"(sum[38]), "+f"(sum[39]),
          "+f"(sum[40]), "+f"(sum[41]), "+f"(sum[42]), "+f"(sum[43]), "+f"(sum[44]), "+f"(sum[45]), "+f"(sum[46]), "+f"(sum[47]),
          "+f"(sum[48]), "+f"(sum[49]), "+f"(sum[50]), "+f"(sum[51]), "+f"(sum[52]), "+f"(sum[53]), "+f"(sum[54]), "+f"(sum[55]),
          "+f"(sum[56]), "+f"(sum[57]), "+f"(sum[58]), "+f"(sum[59]), "+f"(sum[60]), "+f"(sum[61]), "+f"(sum[62]), "+f"(sum[63])
        : "l"(a), "l"(b), "r"(static_cast<int>(add)));
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

constexpr int tiles = tiles_m * tiles_n;

struct Place {
    int row, column;  // counted in tiles
};

// Where a tile lies. Blocks walk down group_m rows of tiles before they move on along n, so that blocks that run together
// share their tiles of A and B in L2.
__device__ __forceinline__ Place place_of(int tile)
{
    constexpr int group_tiles = group_m * tiles_n;
    const int first_row = tile / group_tiles * group_m, rows = min(group_m, tiles_m - first_row), in_group = tile % group_tiles;
    return {first_row + in_group % rows, in_group / rows};
}

extern "C" __global__ void __launch_bounds__(num_threads, 1)
sgemm_3xfp16_wgmma(float alpha, const float* A, const float* B, float beta, float* C, float* workspace)
{
    wait_for_turn();
    extern __shared__ __align__(1024) unsigned char blocks[];  // [stages]: a block of A, a block of B
    constexpr int stage_bytes = OperandA::block_bytes + OperandB::block_bytes;
    const unsigned shared = shared_address(blocks), filled = shared + stages * stage_bytes, emptied = filled + stages * 8;
    const int thread = threadIdx.x, warpgroup = thread / 128;

    const OperandA a = operand_a(workspace);
    const OperandB b = operand_b(workspace);
    if (!in_range(workspace))
        return;  // to the fallback

    if (thread == 0)
        for (int stage = 0; stage < stages; ++stage) {
            barrier_init(filled + stage * 8, 1);
            barrier_init(emptied + stage * 8, 4 * warpgroups);
        }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async;" ::: "memory");
    __syncthreads();

    // One thread fetches the blocks of all tiles, as buffers become empty.
    if (warpgroup == warpgroups) {
        lower_registers<24>();
        if (thread % 128 == 0) {
            int stage = 0;
            unsigned parity = 1;
            for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
                const Place place = place_of(tile);
                for (int step = 0; step < tiles_k; ++step) {
                    const unsigned to = shared + stage * stage_bytes, barrier = filled + stage * 8;
                    wait(emptied + stage * 8, parity);
                    arrive_expecting(barrier, stage_bytes);
                    copy(to, a.block(place.row, step), OperandA::block_bytes, barrier);
                    copy(to + OperandA::block_bytes, b.block(place.column, step), OperandB::block_bytes, barrier);
                    if (++stage == stages)
                        stage = 0, parity ^= 1;
                }
            }
        }
        return;
    }

    // The others multiply. A warp has 16 of its warpgroup's rows: a lane has row lane / 4 and that + 8, and of each 8 columns
    // two neighbours, from lane % 4 * 2 on.
    raise_registers<240>();
    const int lane = thread % 32, warp = thread / 32;
    int stage = 0;
    unsigned parity = 0;
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        float sums[TN];      // sums of the tensor cores: they round towards zero, so they are kept short
        float acc[TN] = {};  // what they were promoted to
        for (int step = 0; step < tiles_k; ++step) {
            const unsigned rows = shared + stage * stage_bytes + warpgroup * (wgmma_m * BK * 2);
            const unsigned columns = shared + stage * stage_bytes + OperandA::block_bytes;
            const unsigned long long a_hi = descriptor(rows), a_lo = descriptor(rows + OperandA::part_bytes);
            const unsigned long long b_hi = descriptor(columns), b_lo = descriptor(columns + OperandB::part_bytes);
            wait(filled + stage * 8, parity);
            // Small products first, so that few additions round a large sum. 16 of k are 32 bytes, counted in units of 16.
            #pragma unroll
            for (int from = 0; from < BK; from += promote) {
                pin(sums);
                wgmma_fence();
                #pragma unroll
                for (int kk = from; kk < from + promote; kk += wgmma_k)
                    wgmma(sums, a_lo + kk / 8, b_hi + kk / 8, kk > from);
                #pragma unroll
                for (int kk = from; kk < from + promote; kk += wgmma_k)
                    wgmma(sums, a_hi + kk / 8, b_lo + kk / 8, true);
                #pragma unroll
                for (int kk = from; kk < from + promote; kk += wgmma_k)
                    wgmma(sums, a_hi + kk / 8, b_hi + kk / 8, true);
                wgmma_commit();
                wgmma_wait(sums);
                if (from + promote == BK && lane == 0)
                    arrive(emptied + stage * 8);
                #pragma unroll
                for (int i = 0; i < TN; ++i)
                    acc[i] += sums[i];
            }
            if (++stage == stages)
                stage = 0, parity ^= 1;
        }

        // Undo the scaling.
        const Place place = place_of(tile);
        const int c_row = place.row * BM + warp * 16 + lane / 4, c_col = place.column * BN + lane % 4 * 2;
        #pragma unroll
        for (int i = 0; i < TN; ++i) {
            const int shift = a.shift(c_row + i % 4 / 2 * 8) + b.shift(c_col + i / 4 * 8 + i % 2);
            acc[i] = alpha * scaled(acc[i], max(-shift, -252));
        }

        // Write the lane's outputs.
        float* const c_lane = C + c_row * ldc + c_col;
        Vector<vec_c> old[TN / vec_c] = {};  // all of C is read before any of it is written: a read behind a write waits for it
        if (beta != 0.0f) {  // C is not read otherwise: it may hold NaN
            #pragma unroll
            for (int i = 0; i < TN; i += vec_c) {
                const int row = i % 4 / 2 * 8, col = i / 4 * 8 + i % 2;
                if (c_row + row < m && c_col + col < n)
                    old[i / vec_c] = *reinterpret_cast<const Vector<vec_c>*>(c_lane + row * ldc + col);
            }
        }
        __syncwarp();  // else the compiler lets the reads sink to the writes, to save registers
        #pragma unroll
        for (int i = 0; i < TN; i += vec_c) {
            const int row = i % 4 / 2 * 8, col = i / 4 * 8 + i % 2;
            if (c_row + row >= m || c_col + col >= n)
                continue;
            Vector<vec_c> out;
            #pragma unroll
            for (int v = 0; v < vec_c; ++v)
                out.lane[v] = acc[i + v] + beta * old[i / vec_c].lane[v];
            *reinterpret_cast<Vector<vec_c>*>(c_lane + row * ldc + col) = out;
        }
    }
}
