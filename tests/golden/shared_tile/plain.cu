// shared_tile: C[m,n] = alpha op(A)[m,k] op(B)[k,n], float32, row-major, layout nn
// config   BM32-BN32-BK32
// template

// The problem.
constexpr int m = 4096;  // rows of C
constexpr int n = 4096;  // columns of C
constexpr int k = 4096;  // length of a dot product
constexpr long long lda = 4096, ldb = 4096, ldc = 4096;  // floats from one stored row to the next

// The choice.
constexpr int BM = 32, BN = 32;  // block tile of C, one output per thread
constexpr int BK = 32;  // depth of one step along k

// What follows from it.
constexpr int num_threads = BM * BN;
constexpr int tiles_m = 128, tiles_n = 128;  // block tiles of C
constexpr int tiles_k = 128;  // steps along k

static_assert(num_threads <= 1024, "a block has at most 1024 threads");

extern "C" __global__ void __launch_bounds__(num_threads)
shared_tile(float alpha, const float* __restrict__ A, const float* __restrict__ B, float beta, float* __restrict__ C)
{
    __shared__ float As[BM][BK];
    __shared__ float Bs[BK][BN];
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
                const int i = e / BK, p = e % BK;
                const bool inside = tile_row + i < m && k0 + p < k;
                if (e < BM * BK)
                    As[i][p] = inside ? A[(tile_row + i) * lda + (k0 + p)] : 0.0f;
            }
            #pragma unroll
            for (int first = 0; first < BK * BN; first += num_threads) {
                const int e = first + thread;
                const int p = e / BN, j = e % BN;
                const bool inside = k0 + p < k && tile_col + j < n;
                if (e < BK * BN)
                    Bs[p][j] = inside ? B[(k0 + p) * ldb + (tile_col + j)] : 0.0f;
            }
            __syncthreads();  // the tiles are complete

            #pragma unroll
            for (int p = 0; p < BK; ++p)
                sum += As[row][p] * Bs[p][col];
            __syncthreads();  // nobody reads the tiles any more
        }

        const int c_row = tile_row + row, c_col = tile_col + col;
        if (c_row < m && c_col < n) {
            C[c_row * ldc + c_col] = alpha * sum;
        }
    }
}
