// sgemm_3xtf32: C[m,n] = alpha op(A)[m,k] op(B)[k,n] + beta C, float32, row-major, layout nt,
// on the tensor cores: every operand is split into two TF32 numbers, x = hi + lo, and
// a b = a_hi b_hi + a_hi b_lo + a_lo b_hi but for a_lo b_lo, which is below 2^-20 |a b|.
// config   BM64-WM16-BN64-WN32-promote32-BK32-split_k64-stages2-vec_a4-vec_b4-vec_c2-exact-fragment_pipeline1-group_m1-min_blocks1
// template

// The problem.
constexpr int m = 64;  // rows of C
constexpr int n = 64;  // columns of C
constexpr int k = 64000;  // length of a dot product
constexpr long long lda = 64000, ldb = 64000, ldc = 64;  // floats from one stored row to the next

// The choice.
constexpr int BM = 64, BN = 64;  // block tile of C
constexpr int BK = 32;  // depth of one step along k
constexpr int WM = 16, WN = 32;  // warp tile
constexpr int promote = 32;  // length along k after which a tensor-core sum moves to FP32 registers
constexpr int stages = 2;  // shared-memory buffers
constexpr int vec_a = 4, vec_b = 4, vec_c = 2;  // floats per global access
constexpr int group_m = 1;  // rows of tiles worked on together
constexpr int split_k = 64;  // parts that k is cut into
// What follows from it.
constexpr int mma_m = 16, mma_n = 8, mma_k = 8;  // what one tensor-core instruction multiplies
constexpr int frags_m = WM / mma_m, frags_n = WN / mma_n;  // of them in a warp tile
constexpr int slices = BK / mma_k;  // of them along one step
constexpr int TN = frags_n * 4;  // outputs of a thread in each of the frags_m
constexpr int warps_n = BN / WN;
constexpr int num_threads = 32 * (BM / WM) * warps_n;
constexpr int tiles_m = 1, tiles_n = 1;  // block tiles of C
constexpr int tiles_k = 2000;  // steps along k
// Tiles are kept as they are stored; the pad of each row lets the lanes of a warp read fragments without bank conflicts.
constexpr int As_row = BK + 4, Bs_row = BK + 4;  // floats from one shared row to the next
constexpr int As_stage = BM * As_row, Bs_stage = BN * Bs_row;  // floats of one buffer
constexpr int As_m = As_row, As_k = 1;  // floats from one element to the next along m, along k
constexpr int Bs_n = Bs_row, Bs_k = 1;  // and along n, along k

static_assert(WM % mma_m == 0 && WN % mma_n == 0 && BK % promote == 0 && promote % mma_k == 0, "whole instructions fill the warp tile");
static_assert(BM % WM == 0 && BN % WN == 0, "whole warp tiles fill the block tile");
static_assert(m % BM == 0 && n % BN == 0, "tiles end at the edge of C");
static_assert(num_threads <= 1024, "a block has at most 1024 threads");
static_assert(lda % vec_a == 0 && ldb % vec_b == 0 && ldc % vec_c == 0, "vectors are aligned in every row");

// `width` floats that move in one instruction.
template <int width>
struct alignas(4 * width) Vector {
    float lane[width];
};

// What is in C. It is not read where beta is zero: it may hold NaN.
__device__ __forceinline__ Vector<vec_c> read_c(const Vector<vec_c>* from, float beta)
{
    Vector<vec_c> old = {};
    if (beta != 0.0f)
        old = *from;
    return old;
}

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

// A tile of `rows` stored rows of `cols` floats; rows are ld floats apart in the matrix and shared_row in shared memory. Each
// thread moves its share, vec floats at a time.
template <int rows, int cols, int vec, long long ld, int shared_row>
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
        return row * shared_row + col;
    }

    // Start a thread's copies to shared memory.
    __device__ __forceinline__ static void copy(unsigned to, const float* from)
    {
        #pragma unroll
        for (int i = 0; i < moves; ++i) {
            const int row = row_of(i), col = col_of(i);
            cp_async<4 * vec>(to + 4 * place(row, col), from + row * ld + col);
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

// sum[16,8] += a[16,8] b[8,8] by a warp, each lane with the elements that the PTX ISA gives it.
__device__ __forceinline__ void mma(float (&sum)[4], const unsigned (&a)[4], const unsigned (&b)[2])
{
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 { %0, %1, %2, %3}, { %4, %5, %6, %7}, { %8, %9}, { %0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
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
sgemm_3xtf32(float alpha, const float* A, const float* B, float beta, float* C, float* workspace)
{
    wait_for_turn();
    extern __shared__ __align__(16) float shared[];
    float* const As = shared;                      // [stages][BM][As_row]
    float* const Bs = shared + stages * As_stage;  // [stages][BN][Bs_row]

    const int thread = threadIdx.x;
    const int warp = thread / 32, lane = thread % 32;
    const int warp_m = warp / warps_n, warp_n = warp % warps_n;

    // k is cut into split_k parts of whole steps; all blocks of one part come before those of the next.
    constexpr int tiles = tiles_m * tiles_n;
    const int part = blockIdx.x / tiles, tile_id = blockIdx.x % tiles;
    const int first_step = part * (tiles_k / split_k) + min(part, tiles_k % split_k);
    const int steps = tiles_k / split_k + (part < tiles_k % split_k);  // of this part
    const int part_k = first_step * BK;  // where the part begins
    // Blocks walk down group_m rows of tiles before they move on along n, so that blocks that run together share
    // their tiles of A and B in L2.
    constexpr int group_tiles = group_m * tiles_n;
    const int group = tile_id / group_tiles, in_group = tile_id % group_tiles;
    constexpr int group_rows = group_m;
    const int block_row = (group * group_m + in_group % group_rows) * BM;
    const int block_col = in_group / group_rows * BN;

    // A is stored along k: where a thread's first move lies in the tile, and in memory.
    using TileA = Tile<BM, BK, vec_a, lda, As_row>;
    const int a_m = TileA::first_row(thread), a_k = TileA::first_col(thread);
    const float* a_global = A + (block_row + a_m) * lda + (part_k + a_k);

    // B is stored along k.
    using TileB = Tile<BN, BK, vec_b, ldb, Bs_row>;
    const int b_n = TileB::first_row(thread), b_k = TileB::first_col(thread);
    const float* b_global = B + (block_col + b_n) * ldb + (part_k + b_k);
    const unsigned a_shared = shared_address(As + TileA::place(a_m, a_k));
    const unsigned b_shared = shared_address(Bs + TileB::place(b_n, b_k));

    // Start copying the next tile of A and of B into buffer `stage`.
    auto load_tile = [&](int stage) {
        TileA::copy(a_shared + 4 * stage * As_stage, a_global);
        TileB::copy(b_shared + 4 * stage * Bs_stage, b_global);
        a_global += BK;
        b_global += BK;
    };

    // In a fragment a lane has row lane / 4 of A and that + 8, column lane / 4 of B, and of k lane % 4 and that + 4.
    const float* const a_lane = As + (warp_m * WM + lane / 4) * As_m + lane % 4 * As_k;
    const float* const b_lane = Bs + (warp_n * WN + lane / 4) * Bs_n + lane % 4 * Bs_k;
    float reg_a[2][frags_m][4], reg_b[2][frags_n][2];
    float sums[frags_m][frags_n][4] = {};  // sums of the tensor cores, which round towards zero: kept short
    float acc[frags_m][TN] = {};  // what they were promoted to

    // Read slice kk of buffer `stage`, the operands of one instruction's depth.
    auto load_fragments = [&](int half, int stage, int kk) {
        #pragma unroll
        for (int i = 0; i < frags_m; ++i)
            #pragma unroll
            for (int q = 0; q < 4; ++q)
                reg_a[half][i][q] = a_lane[stage * As_stage + (i * mma_m + q % 2 * 8) * As_m + (kk * mma_k + q / 2 * 4) * As_k];
        #pragma unroll
        for (int j = 0; j < frags_n; ++j)
            #pragma unroll
            for (int q = 0; q < 2; ++q)
                reg_b[half][j][q] = b_lane[stage * Bs_stage + j * mma_n * Bs_n + (kk * mma_k + q * 4) * Bs_k];
    };

    // sums += reg_a x reg_b, the small products first. After each `promote` of k a sum moves to acc; columns take
    // turns, so that the additions spread over the slices and none waits for the tensor cores.
    auto multiply = [&](int half, int kk) {
        unsigned a_hi[frags_m][4], a_lo[frags_m][4];
        #pragma unroll
        for (int i = 0; i < frags_m; ++i)
            #pragma unroll
            for (int q = 0; q < 4; ++q) {
                const Split a = split(reg_a[half][i][q]);
                a_hi[i][q] = a.hi, a_lo[i][q] = a.lo;
            }
        #pragma unroll
        for (int j = 0; j < frags_n; ++j) {
            const Split b[2] = {split(reg_b[half][j][0]), split(reg_b[half][j][1])};
            const unsigned b_hi[2] = {b[0].hi, b[1].hi}, b_lo[2] = {b[0].lo, b[1].lo};
            #pragma unroll
            for (int i = 0; i < frags_m; ++i)
                mma(sums[i][j], a_lo[i], b_hi);
            #pragma unroll
            for (int i = 0; i < frags_m; ++i)
                mma(sums[i][j], a_hi[i], b_lo);
            #pragma unroll
            for (int i = 0; i < frags_m; ++i)
                mma(sums[i][j], a_hi[i], b_hi);
            if ((kk + 1 + j) % (promote / mma_k) == 0)
                #pragma unroll
                for (int i = 0; i < frags_m; ++i)
                    #pragma unroll
                    for (int q = 0; q < 4; ++q) {
                        acc[i][j * 4 + q] += sums[i][j][q];
                        sums[i][j][q] = 0.0f;
                    }
        }
    };

    // Fill every buffer but one.
    #pragma unroll
    for (int stage = 0; stage < stages - 1; ++stage) {
        load_tile(stage);
        cp_async_commit();
    }
    cp_async_wait<stages - 2>();
    __syncthreads();
    load_fragments(0, 0, 0);

    // Compute on buffer `stage` while a later tile is on its way to the `vacant` one, which all threads left at the
    // last barrier. `more`: there is such a tile.
    auto step = [&](int stage, int next, int vacant, bool more) {
        #pragma unroll
        for (int kk = 0; kk < slices; ++kk) {
            // The operands of the next FFMAs are read before these start, those of the next tile too.
            if (kk < slices - 1) {
                load_fragments((kk + 1) % 2, stage, kk + 1);
            } else {
                cp_async_wait<stages - 2>();
                __syncthreads();
                load_fragments((kk + 1) % 2, next, 0);
            }
            if (kk == 0) {
                if (more)
                    load_tile(vacant);
                cp_async_commit();
            }
            multiply(kk % 2, kk);
        }
    };

    int stage = 0, vacant = stages - 1;
    #pragma unroll 1
    for (int tile = 0; tile < steps; ++tile) {
        const int next = stage + 1 == stages ? 0 : stage + 1;
        step(stage, next, vacant, tile + stages - 1 < steps);
        vacant = stage;
        stage = next;
    }

    // Promote what is left.
    #pragma unroll
    for (int i = 0; i < frags_m; ++i)
        #pragma unroll
        for (int j = 0; j < TN; ++j)
            acc[i][j] += sums[i][j / 4][j % 4];

    // The blocks that computed parts of one tile add them up through the workspace. The one that is done last does it,
    // in the order of k, so that the result does not depend on which one that is.
    constexpr int part_width = frags_m * TN < 4 ? frags_m * TN : 4, part_moves = frags_m * TN / part_width;
    constexpr int counters = 32;  // floats before the sums: whole lines
    constexpr int partials = 72;  // sums of a tile that are kept
    // The counters, [9][tiles], are zero between launches; behind them is kept [partials][tiles][part_moves][num_threads].
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
        for (int i = 0; i < frags_m; ++i)
            #pragma unroll
            for (int j = 0; j < TN; ++j)
                acc[i][j] = 0.0f;
        #pragma unroll 2
        for (int other = 0; other < count; ++other)
            #pragma unroll
            for (int i = 0; i < part_moves; ++i)
                add_to(&acc[0][0] + i * part_width, load_from_l2(&kept[((first + other) * tiles * part_moves + i) * num_threads]));
    };

    keep(part);
    // Too many for one block: sum_group parts become one sum, and then these are added up.
    constexpr int sum_group = 8, sum_groups = 8;
    if (!is_last(1 + part / sum_group, sum_group))
        return;
    add(part / sum_group * sum_group, sum_group);
    keep(split_k + part / sum_group);
    if (!is_last(0, sum_groups))
        return;
    add(split_k, sum_groups);
    // Write the lane's outputs, vec_c at a time: of each fragment two rows, 8 apart, of two columns.
    const int c_row = block_row + warp_m * WM + lane / 4;
    const int c_col = block_col + warp_n * WN + lane % 4 * 2;
    float* const c_lane = C + c_row * ldc + c_col;
    auto row_of = [](int i, int j) { return i * mma_m + j % 4 / 2 * 8; };
    auto col_of = [](int j) { return j / 4 * mma_n + j % 2; };
    auto place = [&](int i, int j) { return reinterpret_cast<Vector<vec_c>*>(c_lane + row_of(i, j) * ldc + col_of(j)); };
    #pragma unroll
    for (int i = 0; i < frags_m; ++i) {
        #pragma unroll
        for (int j = 0; j < TN; j += vec_c)
            *place(i, j) = output(&acc[i][j], alpha, beta, read_c(place(i, j), beta));
    }
}
