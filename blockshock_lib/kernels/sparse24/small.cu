// y [B, N] = x [B, K] W^T (+ bias [N]) for a 2:4 weight W [N, K] in cuSPARSELt's packed form. 16-bit values, fp32 sums.
//
// Hopper's sparse tensor-core instruction, wgmma.sp, reads both operands from shared memory and the metadata from
// registers. So each packed byte goes once from memory to shared memory, DEPTH stages deep and without passing through
// registers, and the order of cuSPARSELt's bytes is kept: only the metadata's nibbles are sorted, 6 integer
// instructions for 16 rows and 64 columns.
//
// A block has ROWS rows of W, a warpgroup TILES times 64 of them, and walks along its share of K, COLS columns a stage.
// SPLIT blocks, a cluster, share K; they add their sums through each other's shared memory in a fixed order, so the
// result is the same each time.
//
// small.py defines TILES, WARPGROUPS, UNROLL, DEPTH, SPLIT, EIGHTS, FP16 where the type is fp16, and writes `multiply`,
// the instruction, whose operands count with EIGHTS: how many times 8 rows of x a block has. Blocks of the same rows of W
// lie side by side, so that what one read of them is found in the L2 cache by the next.
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;

template <int HALF> __device__ __forceinline__ void multiply(float (&sums)[4 * EIGHTS], u64 a, u64 b, u32 metadata) {
    MULTIPLY
}

constexpr int ROWS = 64 * TILES * WARPGROUPS, COLS = 128 * UNROLL, BATCH = 8 * EIGHTS, THREADS = 128 * WARPGROUPS;
// A stage in bytes: values, x, metadata. All begin at a multiple of 1024, where the swizzle begins anew.
constexpr int X_AT = ROWS * COLS, METADATA_AT = X_AT + BATCH * COLS * 2, STAGE = METADATA_AT + ROWS * COLS / 8;
constexpr int PITCH = ROWS + 4;  // of the sums [BATCH][PITCH] in shared memory: no two lanes of a warp share a bank

__device__ __forceinline__ void copy16(u32 to, const char* from, bool inside) {  // zeros where it is not inside
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(inside ? 16 : 0));
}

// A matrix in shared memory with rows of 128 bytes, swizzled by 128 bytes, each next 8 rows 1024 bytes on.
__device__ __forceinline__ u64 described(u32 at) { return (u64)((at & 0x3FFFF) >> 4) | (u64)1 << 16 | (u64)64 << 32 | (u64)1 << 62; }

// cuSPARSELt keeps for row r the nibbles of row r, row r + 8 by turns, of groups g, g + 4, for g = 0, 1 (low) and 2, 3
// (high). The instruction wants four groups of row r, then those of row r + 8; `pick` takes groups 0-3 or 4-7.
__device__ __forceinline__ u32 sorted(u32 low, u32 high, u32 pick) {
    const u32 both = __byte_perm(low, high, pick);
    const u32 first = both & 0x0F0F0F0Fu | both >> 12 & 0xF0F0F0F0u, second = both & 0xF0F0F0F0u | both << 12 & 0x0F0F0F0Fu;
    return __byte_perm(first, second, 0x7610);
}

__device__ __forceinline__ u32 rounded(float low, float high) {
    u32 pair;
#ifdef FP16
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#endif
    return pair;
}

__device__ __forceinline__ float widened(u16 bits) {
#ifdef FP16
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
#else
    return __uint_as_float((u32)bits << 16);
#endif
}

__device__ __forceinline__ void meet_cluster() {
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

extern "C" __global__ void __launch_bounds__(THREADS)
#if SPLIT > 1
__cluster_dims__(1, SPLIT, 1)
#endif
product(const char* __restrict__ values, const char* __restrict__ metadata, const char* __restrict__ x, u32* __restrict__ y,
        const u16* __restrict__ bias, int n, int k, int batch, int x_stride) {
    extern __shared__ __align__(1024) char shared[];
    const u32 base = (u32)__cvta_generic_to_shared(shared);
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5 & 3, group = tid >> 7;
    const int tiles = (batch + BATCH - 1) / BATCH, first = blockIdx.x % tiles * BATCH;  // of x
    x += (size_t)first * x_stride * 2;
    y += (size_t)first * n / 2;
    batch = min(batch - first, BATCH);
    const int row0 = blockIdx.x / tiles * ROWS, blocks = k / 64;
    const int from = (int)((u64)blocks * blockIdx.y / SPLIT) * 64, to = (int)((u64)blocks * (blockIdx.y + 1) / SPLIT) * 64;

    // What of each stage this thread copies, 16 bytes at a time: every THREADS-th piece of the values, the metadata and x.
    // Its columns are the same in all of them, so what differs is the rows' places, and those are found once.
    //
    // Beyond the weight's last row its last rows are read again; beyond the share's last column values and x are zeros.
    constexpr int V_PIECES = ROWS * 8 * UNROLL / THREADS, V_STEP = THREADS / (8 * UNROLL);
    constexpr int M_PIECES = (ROWS * UNROLL + THREADS - 1) / THREADS, M_STEP = THREADS / (64 * UNROLL);
    constexpr int X_PIECES = (BATCH * 16 * UNROLL + THREADS - 1) / THREADS, X_STEP = THREADS / (16 * UNROLL);
    const int v_chunk = tid % (8 * UNROLL), v_row = tid / (8 * UNROLL);
    const int m_chunk = tid % (64 * UNROLL), m_tile = tid / (64 * UNROLL);
    const int x_chunk = tid % (16 * UNROLL), x_row = tid / (16 * UNROLL);
    const char* const v_first = values + (size_t)row0 * k;
    const char* const m_first = metadata + (size_t)(row0 / 64) * k * 8;
    const char* const x_first = x + ((size_t)x_row * x_stride + 8 * x_chunk) * 2;
    const size_t x_step = (size_t)X_STEP * x_stride * 2;
    u32 v_from[V_PIECES], m_from[M_PIECES];
#pragma unroll
    for (int i = 0; i < V_PIECES; i++) v_from[i] = (u32)(min(row0 + v_row + i * V_STEP, n - 1) - row0) * k;
#pragma unroll
    for (int i = 0; i < M_PIECES; i++) m_from[i] = (u32)(min(row0 / 64 + m_tile + i * M_STEP, n / 64 - 1) - row0 / 64) * k * 8;
    const u32 v_to = (v_chunk / 8 * ROWS + v_row) * 128 + (v_chunk % 8 ^ v_row & 7) * 16;
    static_assert(THREADS % (64 * UNROLL) == 0, "the columns of a thread's pieces are one, and so is its rows' swizzle in W");

    auto load = [&](int slot, int k0) {
        const u32 stage = base + slot * STAGE;
        const int v_column = k0 + 16 * v_chunk, m_column = k0 + 2 * m_chunk;
        const bool v_inside = v_column < to, x_inside = k0 + 8 * x_chunk < to;
        const char* const v_at = v_first + (v_inside ? v_column : 0);
        const char* const m_at = m_first + (size_t)(m_column < to ? m_column : 2 * (m_chunk % 16)) * 8;
        const char* x_at = x_first + (size_t)k0 * 2;
#pragma unroll
        for (int i = 0; i < V_PIECES; i++) copy16(stage + v_to + i * V_STEP * 128, v_at + v_from[i], v_inside);
#pragma unroll
        for (int i = 0; i < M_PIECES; i++)
            if (tid + i * THREADS < ROWS * UNROLL) copy16(stage + METADATA_AT + (tid + i * THREADS) * 16, m_at + m_from[i], true);
#pragma unroll
        for (int i = 0; i < X_PIECES; i++, x_at += x_step) {
            const int row = x_row + i * X_STEP;
            const bool inside = x_inside && row < batch;
            if (row < BATCH)
                copy16(stage + X_AT + (x_chunk / 8 * BATCH + row) * 128 + (x_chunk % 8 ^ row & 7) * 16, inside ? x_at : x, inside);
        }
    };

    float sums[TILES][4 * EIGHTS] = {};
    const u32 pick = lane & 1 ? 0x7351 : 0x6240;
    auto start = [&](int slot) {
        const u32 stage = base + slot * STAGE;
        u32 sparsity[2 * UNROLL][TILES];  // lanes 0 and 1 of four serve a block's first 32 columns, 2 and 3 the others
#pragma unroll
        for (int block = 0; block < 2 * UNROLL; block++) {
#pragma unroll
            for (int tile = 0; tile < TILES; tile++) {
                const int at = (group * TILES + tile) * (COLS * 8) + (2 * block + (lane >> 1 & 1)) * 256 + warp * 64 + (lane >> 2) * 8;
                const uint2 words = *(const uint2*)(shared + slot * STAGE + METADATA_AT + at);
                sparsity[block][tile] = sorted(words.x, words.y, pick);
            }
        }
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int block = 0; block < 2 * UNROLL; block++) {
#pragma unroll
            for (int tile = 0; tile < TILES; tile++) {
                const u64 a = described(stage + (block / 2 * ROWS + (group * TILES + tile) * 64) * 128 + block % 2 * 64);
                const u64 b = described(stage + X_AT + block * BATCH * 128);
                multiply<0>(sums[tile], a, b, sparsity[block][tile]);
                multiply<1>(sums[tile], a + 2, b + 4, sparsity[block][tile]);  // 32 columns on, in units of 16 bytes
            }
        }
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    };

#pragma unroll
    for (int ahead = 0; ahead < DEPTH - 1; ahead++) {
        if (from + ahead * COLS < to) load(ahead, from + ahead * COLS);
        asm volatile("cp.async.commit_group;");
    }
    for (int k0 = from, slot = 0; k0 < to; k0 += COLS, slot = slot + 1 == DEPTH ? 0 : slot + 1) {
        // The tensor cores read shared memory by another path than the copies wrote it: the fence joins the two.
        asm volatile("cp.async.wait_group %0;\nfence.proxy.async.shared::cta;" ::"n"(DEPTH - 2) : "memory");
        __syncthreads();
        start(slot);
        // While the tensor cores work, the slot that they have done with is filled.
        const int ahead = k0 + (DEPTH - 1) * COLS;
        if (ahead < to) load(slot == 0 ? DEPTH - 1 : slot - 1, ahead);
        asm volatile("cp.async.commit_group;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
        for (int i = 0; i < TILES * 4 * EIGHTS; i++)  // for the compiler: they are written until here
            asm volatile("" : "+f"(sums[i / (4 * EIGHTS)][i % (4 * EIGHTS)])::"memory");
    }
    asm volatile("cp.async.wait_all;");
    __syncthreads();

    float* table = (float*)shared;
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
#pragma unroll
        for (int j = 0; j < EIGHTS; j++) {
            float* at = table + (8 * j + 2 * (lane & 3)) * PITCH + (group * TILES + tile) * 64 + warp * 16 + (lane >> 2);
            at[0] = sums[tile][4 * j];
            at[PITCH] = sums[tile][4 * j + 1];
            at[8] = sums[tile][4 * j + 2];
            at[PITCH + 8] = sums[tile][4 * j + 3];
        }
    }
    __syncthreads();
    if (SPLIT > 1) meet_cluster();
    for (int i = blockIdx.y * THREADS + tid; i < batch * (ROWS / 2); i += SPLIT * THREADS) {
        const int row = i / (ROWS / 2), column = i % (ROWS / 2) * 2, at = row * PITCH + column;
        float2 sum = make_float2(0, 0);
#pragma unroll
        for (int part = 0; part < SPLIT; part++) {
            float2 more;
            if (SPLIT > 1) {
                u32 far;
                asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(far) : "r"(base + at * 4), "r"(part));
                asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];" : "=f"(more.x), "=f"(more.y) : "r"(far));
            } else {
                more = *(const float2*)(table + at);
            }
            sum.x += more.x;
            sum.y += more.y;
        }
        if (row0 + column < n) {
            if (bias) {
                sum.x += widened(bias[row0 + column]);
                sum.y += widened(bias[row0 + column + 1]);
            }
            y[((size_t)row * n + row0 + column) / 2] = rounded(sum.x, sum.y);
        }
    }
    if (SPLIT > 1) meet_cluster();  // no block leaves while its sums are read
}
