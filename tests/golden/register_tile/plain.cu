// register_tile: C[m,n] = alpha op(A)[m,k] op(B)[k,n], float32, row-major, layout nn
// config   BM64-BN64-TM4-TN4
// template

// The problem.
constexpr int m = 4096;  // rows of C
constexpr int n = 4096;  // columns of C
constexpr int k = 4096;  // length of a dot product
constexpr long long lda = 4096, ldb = 4096, ldc = 4096;  // floats from one stored row to the next

// The choice.
constexpr int BM = 64, BN = 64;  // outputs of a block: its threads share rows of A and columns of B by the cache
constexpr int TM = 4, TN = 4;  // outputs of one thread

// What follows from it.
constexpr int threads_n = BN / TN;  // threads side by side along n
constexpr int num_threads = (BM / TM) * threads_n;
constexpr int tiles_n = 64;  // blocks side by side along n

static_assert(BM % TM == 0 && BN % TN == 0, "whole thread tiles fill the block tile");
static_assert(num_threads <= 1024, "a block has at most 1024 threads");

extern "C" __global__ void __launch_bounds__(num_threads)
register_tile(float alpha, const float* __restrict__ A, const float* __restrict__ B, float beta, float* __restrict__ C)
{
    // A thread has TM neighbouring rows, and TN columns that lie threads_n apart: neighbouring threads have neighbouring
    // columns, so their loads of B and stores of C stay coalesced.
    const int thread = threadIdx.x;
    const int row = blockIdx.x / tiles_n * BM + thread / threads_n * TM;
    const int col = blockIdx.x % tiles_n * BN + thread % threads_n;

    const float* a[TM];
    const float* b[TN];
    #pragma unroll
    for (int i = 0; i < TM; ++i)
        a[i] = A + (row + i) * lda;
    #pragma unroll
    for (int j = 0; j < TN; ++j)
        b[j] = B + (col + j * threads_n);

    float acc[TM][TN] = {};
    for (int p = 0; p < k; ++p) {
        // TM + TN loads feed TM * TN multiplications; the cache serves what other threads have loaded.
        float reg_m[TM], reg_n[TN];
        #pragma unroll
        for (int i = 0; i < TM; ++i)
            reg_m[i] = a[i][p];
        #pragma unroll
        for (int j = 0; j < TN; ++j)
            reg_n[j] = b[j][p * ldb];
        #pragma unroll
        for (int i = 0; i < TM; ++i)
            #pragma unroll
            for (int j = 0; j < TN; ++j)
                acc[i][j] += reg_m[i] * reg_n[j];
    }

    #pragma unroll
    for (int i = 0; i < TM; ++i)
        #pragma unroll
        for (int j = 0; j < TN; ++j) {
            const int c_row = row + i, c_col = col + j * threads_n;
            if (c_row < m && c_col < n) {
                C[c_row * ldc + c_col] = alpha * acc[i][j];
            }
        }
}
