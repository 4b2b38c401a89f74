// sgemm_skinny: C[m,n] = alpha op(A)[m,k] op(B)[k,n] + beta C, float32, row-major, layout tt
// config   vec_a4-vec_b4-LK1-TW4-warps_w1-warps_k4-blocks_per_sm7-unroll_k2-BK64-stages2-ahead2-exact-min_blocks1
// template

// The problem. A has the wide extent of C and is read once from memory; B has the narrow one and is kept close.
constexpr int wide = 4096;  // rows of C
constexpr int narrow = 8;  // columns of C
constexpr int k = 4096;  // length of a dot product
constexpr long long ldw = 4096, ldn = 4096, ldc = 8;  // floats from one stored row of A, B, C to the next

// The choice.
constexpr int TW = 4;  // wide outputs of one thread; it has all narrow ones to each
constexpr int LW = 32, LK = 1;  // lanes of a warp
constexpr int warps_w = 1, warps_k = 4;  // warps of a block
constexpr int BK = 64;  // depth of one step along k
constexpr int unroll_k = 2;  // quads of k that a thread loads together
constexpr int stages = 2;  // sets of them in registers
constexpr int ahead = 2;  // steps that A is called into L2 before it is read
constexpr int vec_w = 4, vec_n = 4;  // floats per global load of A, of B
constexpr int split_k = 28;  // slices of k

// What follows from it.
constexpr int VW = 4, VK = 4;  // contiguous wide outputs and k's of a thread
constexpr int WW = LW * TW, BW = warps_w * WW;  // wide outputs of a warp, of a block
constexpr int num_threads = 32 * warps_w * warps_k;
constexpr int quads_k = 4 * LK;  // k's of a warp's quads
constexpr int turn_k = warps_k * unroll_k * quads_k;  // k's that a block's warps take in turn
constexpr int turns = BK / turn_k;
constexpr int tiles = 32, tiles_k = 64;  // block tiles along the wide extent, steps along k
constexpr int Ns_row = BK;  // floats from one shared row of B to the next
constexpr int Ns_stage = narrow * Ns_row;  // floats of one of its two buffers
constexpr int sums_row = BW + 4;  // floats from one shared row of sums to the next
constexpr int pass_rows = 7;  // rows of sums that shared memory holds for every warp along k
constexpr int outputs = narrow * BW;

static_assert(LW * LK == 32, "a warp has 32 lanes");
static_assert(TW % VW == 0, "whole fragments fill a thread's outputs");
static_assert(BK % turn_k == 0 && turns % stages == 0, "whole turns fill a step, and sets take turns in it");
static_assert(ldw % vec_w == 0 && ldn % vec_n == 0, "vectors are aligned in every row");
static_assert(wide % BW == 0, "tiles end at the edge of C");
static_assert(num_threads <= 1024, "a block has at most 1024 threads");

// `width` floats that move in one instruction.
template <int width>
struct alignas(4 * width) Vector {
    float lane[width];
};

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

// Load past L1 what is read once. Not by the read-only path: such a load may sink below a barrier.
template <int width>
__device__ __forceinline__ Vector<width> load_once(const float* from)
{
    Vector<width> to;
    if constexpr (width == 4)
        asm volatile("ld.global.L1::no_allocate.v4.f32 { %0, %1, %2, %3 }, [%4];"
                     : "=f"(to.lane[0]), "=f"(to.lane[1]), "=f"(to.lane[2]), "=f"(to.lane[3]) : "l"(from));
    else if constexpr (width == 2)
        asm volatile("ld.global.L1::no_allocate.v2.f32 { %0, %1 }, [%2];" : "=f"(to.lane[0]), "=f"(to.lane[1]) : "l"(from));
    else
        asm volatile("ld.global.L1::no_allocate.f32 %0, [%1];" : "=f"(to.lane[0]) : "l"(from));
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
sgemm_skinny(float alpha, const float* A, const float* B, float beta, float* C,
             float* workspace)
{
    wait_for_turn();
    extern __shared__ __align__(16) float shared[];

    const int thread = threadIdx.x;
    const int warp = thread / 32, lane = thread % 32;
    const int warp_w = warp % warps_w, warp_k = warp / warps_w;
    const int lane_w = lane % LW, lane_k = lane / LW;

    // Blocks that run together take the wide tiles of one slice of k: they share its part of B in L2.
    const int slice = blockIdx.x / tiles, tile = blockIdx.x % tiles;
    const int first_step = (long long)tiles_k * slice / split_k;
    const int end_step = (long long)tiles_k * (slice + 1) / split_k;

    // Call what step `step` reads of A into L2, one line of 128 bytes after another.
    constexpr int row_lines = 4, lines = BK * row_lines;
    auto call_wide = [&](int step) {
        #pragma unroll
        for (int i = 0; i < lines; i += num_threads) {
            const int line = i + thread, row = line / row_lines, at = line % row_lines * 32;
            if (i + num_threads > lines && line >= lines)
                break;
            const float* const from = A + ((long long)step * BK + row) * ldw + min(tile * BW + at, wide - 1);
            asm volatile("prefetch.global.L2 [%0];" :: "l"(from));
        }
    };

    // B lies [narrow][k] in memory, and a step of it as [narrow][BK] in one of two buffers.
    float* const Ns = shared;  // [2][narrow][Ns_row]
    auto load_narrow = [&](int step, int buffer) {
        const float* const narrow_global = B + (long long)step * BK;
        const unsigned to = shared_address(Ns + buffer * Ns_stage);
        #pragma unroll
        for (int i = 0; i < narrow * BK / vec_n; i += num_threads) {
            const int piece = i + thread;
            const int row = piece / (BK / vec_n), kk = piece % (BK / vec_n) * vec_n;
            if (i + num_threads <= narrow * BK / vec_n || piece < narrow * BK / vec_n)
                cp_async<4 * vec_n>(to + 4 * (row * Ns_row + kk), narrow_global + row * ldn + kk);
        }
    };

    // A lies [k][wide] in memory; a thread reads fragments that no other reads.
    const int thread_k = warp_k * (unroll_k * quads_k) + lane_k * VK;  // first of its k's within a turn
    const int thread_w = warp_w * WW + lane_w * VW;  // first of its wide outputs within the tile
    constexpr long long stride_w = 1, stride_k = ldw;
    const float* wide_global = A + ((long long)first_step * BK + thread_k) * stride_k;
    wide_global += (tile * BW + thread_w) * stride_w;
    float wide_reg[stages][unroll_k][4][TW];

    // Read the quads of turn `turn`.
    auto load_wide = [&](int stage, int turn) {
        #pragma unroll
        for (int u = 0; u < unroll_k; ++u)
            #pragma unroll
            for (int f = 0; f < TW / VW; ++f)
                #pragma unroll
                for (int kk = 0; kk < 4; kk += 1) {
                    const int at = turn * turn_k + u * quads_k + kk;
                    const auto piece = load_once<vec_w>(wide_global + f * (LW * VW) * stride_w + at * stride_k);
                    #pragma unroll
                    for (int v = 0; v < vec_w; ++v)
                        wide_reg[stage][u][kk][f * VW + v] = piece.lane[v];
                }
    };

    float acc[narrow * TW] = {};  // [narrow][TW]

    // acc += the quads of a turn times the same k's of B.
    auto multiply = [&](int stage, int buffer, int turn) {
        #pragma unroll
        for (int u = 0; u < unroll_k; ++u)
            #pragma unroll
            for (int i = 0; i < narrow; ++i) {
                float narrow_reg[4];
                #pragma unroll
                for (int kk = 0; kk < 4; kk += VK) {
                    const auto piece = *reinterpret_cast<const Vector<VK>*>(
                        &Ns[buffer * Ns_stage + i * Ns_row + thread_k + turn * turn_k + u * quads_k + kk * LK]);
                    #pragma unroll
                    for (int v = 0; v < VK; ++v)
                        narrow_reg[kk + v] = piece.lane[v];
                }
                #pragma unroll
                for (int kk = 0; kk < 4; ++kk)
                    #pragma unroll
                    for (int w = 0; w < TW; ++w)
                        acc[i * TW + w] += narrow_reg[kk] * wide_reg[stage][u][kk][w];
            }
    };

    int step = first_step, buffer = 0;
    load_narrow(step, buffer);
    cp_async_commit();

    // B of this step has arrived, and nobody reads that of the last one: have the next one brought there.
    auto exchange = [&]() {
        cp_async_wait<0>();
        __syncthreads();
        if (step + 1 < end_step)
            load_narrow(step + 1, buffer ^ 1);
        cp_async_commit();
    };

    const int whole_steps = end_step;
    if (step < whole_steps)
        load_wide(0, 0);
    #pragma unroll
    for (int s = 0; s < ahead; ++s)
        if (step + s < whole_steps)
            call_wide(step + s);
    #pragma unroll 1
    for (; step < whole_steps; ++step, buffer ^= 1) {
        #pragma unroll
        for (int turn = 0; turn < turns; ++turn) {
            if (turn == 0)
                exchange();
            if (turn == 0 && step + ahead < whole_steps)
                call_wide(step + ahead);
            if (turn + 1 < turns || step + 1 < whole_steps)
                load_wide((turn + 1) % 2, turn + 1);
            multiply(turn % 2, buffer, turn);
        }
        wide_global += BK * stride_k;
    }

    // Write output (i, w) of the tile.
    auto store = [&](int i, int w, float sum) {
        float* const to = C + (tile * BW + w) * ldc + i;
        *to = beta != 0.0f ? alpha * sum + beta * *to : alpha * sum;  // C may hold NaN where beta is zero
    };

    // The workspace: a counter for each tile; from a whole line on [split_k][tiles][outputs], of which these are the tile's.
    constexpr int counters = (tiles + 31) / 32 * 32;
    constexpr long long slice_floats = (long long)tiles * outputs;
    float* const partials = workspace + counters + (long long)tile * outputs;

    // Add up the lanes along k, then the warps, in their order: pass_rows narrow outputs at a time.
    float* const sums = shared;  // [warps_k][pass_rows][sums_row]
    constexpr int kept = narrow * TW, first = 0;
    constexpr bool owner = true;
    constexpr int width = kept % VW ? 1 : VW;  // sums that lie side by side
    #pragma unroll
    for (int row = 0; row < narrow; row += pass_rows) {
        __syncthreads();  // nobody reads shared memory any more
        #pragma unroll
        for (int j = 0; j < kept; j += width) {
            const int i = (first + j) / TW, w = (first + j) % TW;
            if (!owner || i < row || i >= row + pass_rows)
                continue;
            Vector<width> piece;
            #pragma unroll
            for (int v = 0; v < width; ++v)
                piece.lane[v] = acc[j + v];
            const int at = (warp_k * pass_rows + i - row) * sums_row + thread_w + w / VW * (LW * VW) + w % VW;
            *reinterpret_cast<Vector<width>*>(&sums[at]) = piece;
        }
        __syncthreads();
        const int rows = min(pass_rows, narrow - row);
        #pragma unroll 4
        for (int o = thread; o < rows * BW; o += num_threads) {
            const int i = o % rows, w = o / rows;
            float sum = sums[i * sums_row + w];
            #pragma unroll
            for (int other = 1; other < warps_k; ++other)
                sum += sums[(other * pass_rows + i) * sums_row + w];
            partials[slice * slice_floats + w * narrow + row + i] = sum;
        }
    }

    // The block that finishes a tile last adds up its slices, in their order, and leaves the counter at zero.
    __syncthreads();  // the partial sums of this slice are written
    const bool is_last = thread == 0 && count_in(reinterpret_cast<unsigned*>(workspace) + tile, split_k - 1) == split_k - 1;
    if (!__syncthreads_or(is_last))
        return;

    constexpr int vec_o = 4, batch = 2;  // outputs of a vector, vectors that a thread adds up together
    #pragma unroll 1
    for (int first_o = thread * vec_o; first_o < outputs; first_o += batch * num_threads * vec_o) {
        Vector<vec_o> total[batch] = {};
        #pragma unroll 8
        for (int other = 0; other < split_k; ++other)
            #pragma unroll
            for (int b = 0; b < batch; ++b) {
                const int o = first_o + b * (num_threads * vec_o);
                if (outputs % (batch * num_threads * vec_o) != 0 && o >= outputs)
                    continue;
                const auto piece = load_from_l2(reinterpret_cast<const Vector<vec_o>*>(partials + other * slice_floats + o));
                #pragma unroll
                for (int v = 0; v < vec_o; ++v)
                    total[b].lane[v] += piece.lane[v];
            }
        #pragma unroll
        for (int b = 0; b < batch; ++b)
            #pragma unroll
            for (int v = 0; v < vec_o; ++v) {
                const int o = first_o + b * (num_threads * vec_o) + v;
                if (outputs % (batch * num_threads * vec_o) == 0 || o < outputs)
                    store(o % narrow, o / narrow, total[b].lane[v]);
            }
    }
}
