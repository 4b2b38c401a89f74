// found[0] = 1 where A or B, as stored, holds an infinity or no number; it stays as it is otherwise. The constants stand
// before this text; the rows of a batch are counted through, a_matrix of each A, behind which a_gap floats follow. The
// signature is that of a multiplication, so that whoever launches those can launch this.
constexpr int piece = 1024;  // floats of a row that a block looks at in one go
constexpr long long a_pieces = (a_cols + piece - 1) / piece, b_pieces = (b_cols + piece - 1) / piece;

__device__ __forceinline__ bool all_finite(const float* from, long long count)
{
    bool finite = true;
    for (long long i = threadIdx.x; i < piece && i < count; i += blockDim.x)
        finite &= (__float_as_uint(from[i]) & 0x7f800000u) != 0x7f800000u;
    return finite;
}

extern "C" __global__ void __launch_bounds__(256)
find_not_finite(float, const float* __restrict__ A, const float* __restrict__ B, float, float* __restrict__ found)
{
    bool finite = true;
    for (long long at = blockIdx.x; at < a_rows * a_pieces; at += gridDim.x) {
        const long long row = at / a_pieces, col = at % a_pieces * piece;
        finite &= all_finite(A + row * lda + row / a_matrix * a_gap + col, a_cols - col);
    }
    for (long long at = blockIdx.x; at < b_rows * b_pieces; at += gridDim.x) {
        const long long row = at / b_pieces, col = at % b_pieces * piece;
        finite &= all_finite(B + row * ldb + row / b_matrix * b_gap + col, b_cols - col);
    }
    if (!finite)
        atomicExch(found, 1.0f);  // several blocks may say so
}
