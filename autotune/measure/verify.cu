// What verification computes on the GPU: inputs, float64 references, comparisons, and checks for stray writes.
//
// No candidate takes part in any of this. Matrices are float32 and addressed by two strides in elements, so one
// kernel serves every layout; every sum is float64; every index that can pass 2^31 has 64 bits. Sums that several
// blocks share are added atomically to memory that the host has zeroed.

typedef long long Index;
typedef unsigned long long Word64;

constexpr int WARP = 32;
constexpr int THREADS = 256;            // per block, in every kernel of this file
constexpr int WARPS = THREADS / WARP;

// ---------------------------------------------------------------------------------------------- small pieces

// Finaliser of SplitMix64 (Steele, Lea, Flood 2014): every input bit reaches every output bit.
__device__ Word64 scrambled(Word64 bits) {
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9ull;
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EBull;
    return bits ^ (bits >> 31);
}

template <typename T>
__device__ T warp_sum(T value) {
    for (int offset = WARP / 2; offset > 0; offset /= 2) value += __shfl_down_sync(0xFFFFFFFFu, value, offset);
    return value;                       // complete in lane 0
}

// Add one value per thread to *total; all threads of the block must call it.
template <typename T>
__device__ void add_block_sum(T value, T* total) {
    value = warp_sum(value);
    if (threadIdx.x % WARP == 0) atomicAdd(total, value);
}

__device__ Index thread_index() { return Index(blockIdx.x) * THREADS + threadIdx.x; }
__device__ Index thread_count() { return Index(gridDim.x) * THREADS; }

// The largest ratio seen and where: the ratio's float bits above the index (non-negative floats sort as integers).
// A NaN ratio counts as infinite. Index: below 2^32.
__device__ Word64 packed_ratio(double error, double limit, Index index) {
    double ratio = error <= 0.0 ? 0.0 : error / limit;
    if (!(ratio <= 3.0e38)) ratio = 1.0 / 0.0;
    return Word64(__float_as_uint(float(ratio))) << 32 | Word64(index);
}

// ---------------------------------------------------------------------------------------------- inputs

// Fill values[count] with N(0,1): Box-Muller on 2 x 24 random bits of (seed, pair). Largest magnitude: 5.8.
extern "C" __global__ void fill_normal(float* values, Index count, Word64 seed) {
    constexpr float STEP = 1.0f / 16777216.0f;  // 2^-24
    for (Index pair = thread_index(); 2 * pair < count; pair += thread_count()) {
        const Word64 bits = scrambled(seed + Word64(pair + 1) * 0x9E3779B97F4A7C15ull);
        const float radius = sqrtf(-2.0f * logf(float((unsigned(bits >> 40)) + 1u) * STEP));
        float sine, cosine;
        sincospif(2.0f * float(unsigned(bits) & 0xFFFFFFu) * STEP, &sine, &cosine);
        values[2 * pair] = radius * cosine;
        if (2 * pair + 1 < count) values[2 * pair + 1] = radius * sine;
    }
}

// ---------------------------------------------------------------------------------------------- references

constexpr int TILE = 64;                // outputs of a block: TILE x TILE
constexpr int DEPTH = 16;               // k indices held in shared memory at a time
constexpr int SIDE = 16;                // threads of a block: SIDE x SIDE
constexpr int OUT = TILE / SIDE;        // outputs of a thread: OUT x OUT

// Stage tile[depth][line] = matrix[lines[first_line + line], first_depth + depth], zero outside.
__device__ void load_tile(double (&tile)[DEPTH][TILE + 1], const float* matrix, Index line_stride, Index depth_stride,
                          const int* lines, int first_line, int line_count, int first_depth, int depth_end) {
    const bool along_depth = depth_stride == 1;  // neighbouring threads read neighbouring addresses
    for (int slot = threadIdx.x; slot < TILE * DEPTH; slot += THREADS) {
        const int line = along_depth ? slot / DEPTH : slot % TILE;
        const int depth = along_depth ? slot % DEPTH : slot / TILE;
        const bool inside = line < line_count - first_line && depth < depth_end - first_depth;
        tile[depth][line] = inside ? double(matrix[Index(lines[first_line + line]) * line_stride
                                                   + Index(first_depth + depth) * depth_stride])
                                   : 0.0;
    }
}

// expected[r, c] += alpha A[rows[r], :] B[:, cols[c]] + beta C0[rows[r], cols[c]]
// limit[r, c]    += |alpha| |A||B| + |beta| |C0|, the same sum over magnitudes
// Grid: x = all tiles, row by row; y = slices of `slice` k indices each. C0 may be null when beta is 0.
extern "C" __global__ void __launch_bounds__(THREADS) reference(
    const float* A, Index a_row, Index a_col, const float* B, Index b_row, Index b_col, const float* C0, Index ldc,
    const int* rows, int row_count, const int* cols, int col_count, int k, int slice, double alpha, double beta,
    double* expected, double* limit) {
    __shared__ double As[DEPTH][TILE + 1];
    __shared__ double Bs[DEPTH][TILE + 1];
    const int tiles_per_row = (col_count - 1) / TILE + 1;
    const int first_row = int(blockIdx.x) / tiles_per_row * TILE;
    const int first_col = int(blockIdx.x) % tiles_per_row * TILE;
    const int begin = int(blockIdx.y) * slice;
    const int end = k - begin < slice ? k : begin + slice;
    const int ty = threadIdx.x / SIDE;
    const int tx = threadIdx.x % SIDE;

    double sum[OUT][OUT] = {};
    double magnitude[OUT][OUT] = {};
    for (int depth = begin; depth < end; depth = end - depth > DEPTH ? depth + DEPTH : end) {
        load_tile(As, A, a_row, a_col, rows, first_row, row_count, depth, end);
        load_tile(Bs, B, b_col, b_row, cols, first_col, col_count, depth, end);
        __syncthreads();
#pragma unroll 2
        for (int d = 0; d < DEPTH; ++d) {
            double a[OUT], b[OUT];
            for (int i = 0; i < OUT; ++i) a[i] = As[d][ty + SIDE * i];
            for (int j = 0; j < OUT; ++j) b[j] = Bs[d][tx + SIDE * j];
            for (int i = 0; i < OUT; ++i)
                for (int j = 0; j < OUT; ++j) {
                    sum[i][j] = fma(a[i], b[j], sum[i][j]);
                    magnitude[i][j] = fma(fabs(a[i]), fabs(b[j]), magnitude[i][j]);
                }
        }
        __syncthreads();
    }

    for (int i = 0; i < OUT; ++i)
        for (int j = 0; j < OUT; ++j) {
            const int row = first_row + ty + SIDE * i;
            const int col = first_col + tx + SIDE * j;
            if (row >= row_count || col >= col_count) continue;
            double value = alpha * sum[i][j];
            double bound = fabs(alpha) * magnitude[i][j];
            if (beta != 0.0 && blockIdx.y == 0) {
                const double c0 = C0[Index(rows[row]) * ldc + cols[col]];
                value = fma(beta, c0, value);
                bound = fma(fabs(beta), fabs(c0), bound);
            }
            atomicAdd(&expected[Index(row) * col_count + col], value);
            atomicAdd(&limit[Index(row) * col_count + col], bound);
        }
}

// sums[i] += sum over j of weights[j] M[i, j] (SQUARED: of its square); null weights are ones. One warp per row;
// grid: x = rows / WARPS, y = slices of the columns, z = matrices of a batch, whose elements, weights and sums lie
// `step`, `weights_step` and `rows` apart.
template <bool SQUARED>
__device__ void add_row_sums(const float* M, Index rows, Index cols, Index row_stride, Index col_stride, Index step,
                             const double* weights, Index weights_step, double* sums) {
    M += blockIdx.z * step;
    sums += blockIdx.z * rows;
    if (weights != nullptr) weights += blockIdx.z * weights_step;
    const Index row = Index(blockIdx.x) * WARPS + threadIdx.x / WARP;
    if (row >= rows) return;            // the whole warp leaves together
    const Index slice = ((cols - 1) / gridDim.y + WARP) / WARP * WARP;
    const Index begin = blockIdx.y * slice;
    const Index end = begin + slice < cols ? begin + slice : cols;
    const float* line = M + row * row_stride;
    double sum = 0.0;
#pragma unroll 4
    for (Index j = begin + threadIdx.x % WARP; j < end; j += WARP) {
        const double term = double(line[j * col_stride]) * (weights == nullptr ? 1.0 : weights[j]);
        sum += SQUARED ? term * term : term;
    }
    sum = warp_sum(sum);
    if (threadIdx.x % WARP == 0) atomicAdd(&sums[row], sum);
}

// sums += M weights
extern "C" __global__ void project(const float* M, Index rows, Index cols, Index row_stride, Index col_stride,
                                   Index step, const double* weights, Index weights_step, double* sums) {
    add_row_sums<false>(M, rows, cols, row_stride, col_stride, step, weights, weights_step, sums);
}

// sums[i] += squared 2-norm of row i of M diag(weights)
extern "C" __global__ void row_squares(const float* M, Index rows, Index cols, Index row_stride, Index col_stride,
                                       Index step, const double* weights, Index weights_step, double* sums) {
    add_row_sums<true>(M, rows, cols, row_stride, col_stride, step, weights, weights_step, sums);
}

// ---------------------------------------------------------------------------------------------- comparisons

// Compare C at rows x cols with expected: *worst = largest |error| / limit (packed_ratio, index r * col_count + c),
// squares[0] += error^2, squares[1] += expected^2, squares[2] += limit^2. row_count * col_count: below 2^32.
extern "C" __global__ void compare(const float* C, Index ldc, const int* rows, int row_count, const int* cols,
                                   int col_count, const double* expected, const double* limit, Word64* worst,
                                   double* squares) {
    Word64 largest = 0;
    double error_squares = 0.0, expected_squares = 0.0, limit_squares = 0.0;
    const Index count = Index(row_count) * col_count;
    for (Index index = thread_index(); index < count; index += thread_count()) {
        const double wanted = expected[index];
        const double error = C[Index(rows[index / col_count]) * ldc + cols[index % col_count]] - wanted;
        const Word64 packed = packed_ratio(fabs(error), limit[index], index);
        largest = packed > largest ? packed : largest;
        error_squares += error * error;
        expected_squares += wanted * wanted;
        limit_squares += limit[index] * limit[index];
    }
    if (largest > 0) atomicMax(worst, largest);
    add_block_sum(error_squares, &squares[0]);
    add_block_sum(expected_squares, &squares[1]);
    add_block_sum(limit_squares, &squares[2]);
}

// Compare two vectors: *worst = largest |found - expected| / limit.
extern "C" __global__ void compare_projection(const double* found, const double* expected, const double* limit,
                                              Index count, Word64* worst) {
    Word64 largest = 0;
    for (Index index = thread_index(); index < count; index += thread_count()) {
        const Word64 packed = packed_ratio(fabs(found[index] - expected[index]), limit[index], index & 0xFFFFFFFFll);
        largest = packed > largest ? packed : largest;
    }
    if (largest > 0) atomicMax(worst, largest);
}

// ---------------------------------------------------------------------------------------------- stray writes

// Region r of memory is words[spans[2 r]] up to, not including, words[spans[2 r + 1]]; r = blockIdx.y.

// sums[r] += a weighted sum modulo 2^64. The weights are odd and below 2^32, so any one changed word changes it.
extern "C" __global__ void checksum(const unsigned* words, const Index* spans, Word64* sums) {
    const Index begin = spans[2 * blockIdx.y], end = spans[2 * blockIdx.y + 1];
    Word64 sum = 0;
#pragma unroll 4
    for (Index index = begin + thread_index(); index < end; index += thread_count())
        sum += Word64(words[index]) * (2u * unsigned(index) + 1u);
    add_block_sum(sum, &sums[blockIdx.y]);
}

// What guard zones hold: a NaN of its own in every word, neither the one that arithmetic returns (0x7FFFFFFF) nor
// the one of a poisoned C (0xFFFFFFFF). So a word that was copied from elsewhere shows.
__device__ unsigned guard_word(Index index) { return 0xFFC00000u | (unsigned(index) & 0x1FFFFFu); }

extern "C" __global__ void fill_guards(unsigned* words, const Index* spans) {
    const Index begin = spans[2 * blockIdx.y], end = spans[2 * blockIdx.y + 1];
    for (Index index = begin + thread_index(); index < end; index += thread_count()) words[index] = guard_word(index);
}

// counts[r] += words that `fill_guards` would change.
extern "C" __global__ void count_changed(const unsigned* words, const Index* spans, Word64* counts) {
    const Index begin = spans[2 * blockIdx.y], end = spans[2 * blockIdx.y + 1];
    Word64 changed = 0;
    for (Index index = begin + thread_index(); index < end; index += thread_count())
        changed += words[index] != guard_word(index);
    add_block_sum(changed, &counts[blockIdx.y]);
}
