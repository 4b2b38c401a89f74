// naive: C[m,n] = alpha op(A)[m,k] op(B)[k,n], float32, row-major, layout nn
// config   BM32-BN32
// template

// The problem.
constexpr int m = 4096;  // rows of C
constexpr int n = 4096;  // columns of C
constexpr int k = 4096;  // length of a dot product
constexpr long long lda = 4096, ldb = 4096, ldc = 4096;  // floats from one stored row to the next

// The choice.
constexpr int BM = 32, BN = 32;  // outputs of a block, one per thread

// What follows from it.
constexpr int num_threads = BM * BN;
constexpr int tiles_n = 128;  // blocks side by side along n

static_assert(num_threads <= 1024, "a block has at most 1024 threads");

extern "C" __global__ void __launch_bounds__(num_threads)
naive(float alpha, const float* __restrict__ A, const float* __restrict__ B, float beta, float* __restrict__ C)
{
    // threadIdx.x runs through the 32 lanes of a warp first, and here it chooses the row: the lanes
    // read from 32 rows of A and write to 32 rows of C, each of them a memory transaction of its own.
    const int row = blockIdx.x / tiles_n * BM + threadIdx.x;
    const int col = blockIdx.x % tiles_n * BN + threadIdx.y;

    if (row < m && col < n) {
        float sum = 0.0f;
        for (int p = 0; p < k; ++p)
            sum += A[row * lda + p] * B[p * ldb + col];

        C[row * ldc + col] = alpha * sum;
    }
}
