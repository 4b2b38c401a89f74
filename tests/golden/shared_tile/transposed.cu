// shared_tile: C[m,n] = alpha op(A)[m,k] op(B)[k,n] + beta C, float32, row-major, layout tt
// config   BM32-BN32-BK32
// template

// The problem.
constexpr int m = 100;  // rows of C
constexpr int n = 70;  // columns of C
constexpr int k = 33;  // length of a dot product
constexpr long long lda = 100, ldb = 33, ldc = 70;  // floats from one stored row to the next

// The choice.
constexpr int BM = 32, BN = 32;  // block tile of C, one output per thread
constexpr int BK = 32;  // depth of one step along k

// What follows from it.
constexpr int num_threads = BM * BN;
constexpr int tiles_m = 4, tiles_n = 3;  // block tiles of C
constexpr int tiles_k = 2;  // steps along k

static_assert(num_threads <= 1024, "a block has at most 1024 threads");

extern "C" __global__ void __launch_bounds__(num_threads)
shared_tile(float alpha, const float* __restrict__ A, const float* __restrict__ B, float beta, float* __restrict__ C)
{
    // A tile stored across the direction in which it is loaded has one more float per row: it spreads over the banks.
    __shared__ float As[BM][BK + 1];
    __shared__ float Bs[BK][BN + 1];
    static_assert(sizeof(As) + sizeof(Bs) <= 48 * 1024, "static shared memory ends at 48 KiB");

    const int thread = threadIdx.x;
    const int row = thread / BN, col = thread % BN;  // the thread's output within a tile

    // The grid is as large as the GPU, not as C: a block takes one tile after another.
    for (unsigned tile = blockIdx.x; tile < static_cast<unsigned>(tiles_m) * tiles_n; tile += gridDim.x) {
        const int tile_row = tile / tiles_n * BM, tile_col = tile % tiles_n * BN;
        float sum = 0.0f;

        for (int step = 0; step < tiles_k; ++step) {
            const int k0 = step * BK;

            // All threads copy the tiles together, neighbours from neighbouring addresses; zeros beyond the edges. The
            // shapes of the tiles need not match the number of threads.
            #pragma unroll
            for (int first = 0; first < BM * BK; first += num_threads) {
                const int e = first + thread;
                const int i = e % BM, p = e / BM;
                const bool inside = tile_row + i < m && k0 + p < k;
                if (e < BM * BK)
                    As[i][p] = inside ? A[(k0 + p) * lda + (tile_row + i)] : 0.0f;
            }
            #pragma unroll
            for (int first = 0; first < BK * BN; first += num_threads) {
                const int e = first + thread;
                const int p = e % BK, j = e / BK;
                const bool inside = k0 + p < k && tile_col + j < n;
                if (e < BK * BN)
                    Bs[p][j] = inside ? B[(tile_col + j) * ldb + (k0 + p)] : 0.0f;
            }
            __syncthreads();  // the tiles are complete

            #pragma unroll
            for (int p = 0; p < BK; ++p)
                sum += As[row][p] * Bs[p][col];
            __syncthreads();  // nobody reads the tiles any more
        }

        const int c_row = tile_row + row, c_col = tile_col + col;
        if (c_row < m && c_col < n) {
            const float old = beta != 0.0f ? C[c_row * ldc + c_col] : 0.0f;  // C is not read otherwise: it may hold NaN
            C[c_row * ldc + c_col] = alpha * sum + beta * old;
        }
    }
}
