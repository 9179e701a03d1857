// The sum over WORLD GPUs of what each wrote into its symmetric workspace, by loads from the peers' memory.
//
// Every rank launches the same kernel with the same sizes, in the same order. Block b of one rank meets block b of the
// others and depends on no other block, so no grid need be resident as a whole. Sums are in fp32, in rank order, and
// rounded once: all ranks get the same bits.
//
// Defines:
//   WORLD       2, 4 or 8 ranks
//   ELEMENT     0 bf16, 1 fp16, 2 fp32
//   MAX_BLOCKS  of any launch
//   DATA        bytes before the data: flags, [3][MAX_BLOCKS][WORLD] words, zero when no kernel runs

#if WORLD == 2
#define PEERS char *p0, char *p1
#define PEER_LIST p0, p1
#elif WORLD == 4
#define PEERS char *p0, char *p1, char *p2, char *p3
#define PEER_LIST p0, p1, p2, p3
#else
#define PEERS char *p0, char *p1, char *p2, char *p3, char *p4, char *p5, char *p6, char *p7
#define PEER_LIST p0, p1, p2, p3, p4, p5, p6, p7
#endif

constexpr int VALUES = ELEMENT == 2 ? 4 : 8;  // in a packet of 16 bytes
constexpr int UNROLL = 8 / WORLD;             // a thread has 8 loads in flight

struct Packet {
    unsigned word[4];
};

// A peer's data change between kernels, so no load may be served from a cache that the peer's writes do not reach.
__device__ Packet load(const char* at) {
    Packet p;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(p.word[0]), "=r"(p.word[1]), "=r"(p.word[2]), "=r"(p.word[3])
                 : "l"(at)
                 : "memory");
    return p;
}

__device__ void store(char* at, Packet p) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(p.word[0]), "r"(p.word[1]), "r"(p.word[2]),
                 "r"(p.word[3])
                 : "memory");
}

__device__ void add(float (&sum)[VALUES], Packet p) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
#if ELEMENT == 0
        sum[2 * i] += __uint_as_float(p.word[i] << 16);
        sum[2 * i + 1] += __uint_as_float(p.word[i] & 0xffff0000u);
#elif ELEMENT == 1
        float low, high;
        asm("{.reg .f16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b;}"
            : "=f"(low), "=f"(high)
            : "r"(p.word[i]));
        sum[2 * i] += low;
        sum[2 * i + 1] += high;
#else
        sum[i] += __uint_as_float(p.word[i]);
#endif
    }
}

__device__ Packet rounded(const float (&sum)[VALUES]) {
    Packet p;
#pragma unroll
    for (int i = 0; i < 4; i++) {
#if ELEMENT == 0
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(p.word[i]) : "f"(sum[2 * i + 1]), "f"(sum[2 * i]));
#elif ELEMENT == 1
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(p.word[i]) : "f"(sum[2 * i + 1]), "f"(sum[2 * i]));
#else
        p.word[i] = __float_as_uint(sum[i]);
#endif
    }
    return p;
}

// The sum of one packet of every rank, and of the bias packet of its columns.
__device__ Packet total(const Packet (&parts)[WORLD], const char* bias, int packet, int row_packets) {
    float sum[VALUES];
#pragma unroll
    for (int i = 0; i < VALUES; i++) sum[i] = -0.0f;  // what any number, -0 too, is added to unchanged
#pragma unroll
    for (int r = 0; r < WORLD; r++) add(sum, parts[r]);
    if (bias) add(sum, load(bias + 16LL * (packet % row_packets)));
    return rounded(sum);
}

// This block and the same block of every peer have come here: what was written before is read after, and what was read
// before may be written after.
//
// Each rank sets a flag at each peer and clears its own once it saw it. A flag is set again only after another meeting,
// with flags of another SET, has shown that the peer saw it: meetings in a row, across kernels too, differ in SET.
template <int SET>
__device__ void meet(char* const (&peers)[WORLD], int rank) {
    __syncthreads();
    int other = threadIdx.x;
    if (other < WORLD && other != rank) {
        char *theirs = peers[0], *mine = peers[0];
#pragma unroll
        for (int r = 1; r < WORLD; r++) {
            theirs = r == other ? peers[r] : theirs;
            mine = r == rank ? peers[r] : mine;
        }
        int first = (SET * MAX_BLOCKS + blockIdx.x) * WORLD;
        asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(theirs + 4 * (first + rank)), "r"(1) : "memory");
        unsigned seen;
        do {
            asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(mine + 4 * (first + other)) : "memory");
        } while (!seen);
        asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(mine + 4 * (first + other)), "r"(0) : "memory");
    }
    __syncthreads();
}

// Every rank reads all of every rank's data.
//
// p0...: the ranks' workspaces; out: packets, in no workspace; bias: row_packets packets or null; offset: bytes from DATA.
extern "C" __global__ void __launch_bounds__(512)
    all_reduce_one_shot(PEERS, char* out, const char* bias, long long offset, int packets, int row_packets, int rank) {
    char* const peers[WORLD] = {PEER_LIST};
    int lanes = gridDim.x * blockDim.x;
    meet<0>(peers, rank);
    for (int first = blockIdx.x * blockDim.x + threadIdx.x; first < packets; first += UNROLL * lanes) {
        Packet parts[UNROLL][WORLD];
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            int at = min(first + u * lanes, packets - 1);
#pragma unroll
            for (int r = 0; r < WORLD; r++) parts[u][r] = load(peers[r] + DATA + offset + 16LL * at);
        }
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            int at = first + u * lanes;
            if (at < packets) store(out + 16LL * at, total(parts[u], bias, at, row_packets));
        }
    }
    meet<1>(peers, rank);
}

// Every rank sums its share of the packets into its own workspace, then reads the others' shares.
//
// The arguments are those above. A block reads in a peer's share what the same block of that peer has summed.
extern "C" __global__ void __launch_bounds__(512)
    all_reduce_two_shot(PEERS, char* out, const char* bias, long long offset, int packets, int row_packets, int rank) {
    char* const peers[WORLD] = {PEER_LIST};
    int lanes = gridDim.x * blockDim.x, start = blockIdx.x * blockDim.x + threadIdx.x;
    int share = (packets + WORLD - 1) / WORLD, own = rank * share, held = min(share, packets - own);
    char* mine = peers[0];
#pragma unroll
    for (int r = 1; r < WORLD; r++) mine = r == rank ? peers[r] : mine;

    meet<0>(peers, rank);
    for (int first = start; first < held; first += UNROLL * lanes) {
        Packet parts[UNROLL][WORLD];
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            int at = own + min(first + u * lanes, held - 1);
#pragma unroll
            for (int r = 0; r < WORLD; r++) parts[u][r] = load(peers[r] + DATA + offset + 16LL * at);
        }
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            if (first + u * lanes >= held) break;
            int at = own + first + u * lanes;
            Packet sum = total(parts[u], bias, at, row_packets);
            store(mine + DATA + offset + 16LL * at, sum);
            store(out + 16LL * at, sum);
        }
    }
    meet<1>(peers, rank);
    for (int first = start; first < share; first += UNROLL * lanes) {
        Packet parts[UNROLL][WORLD];
#pragma unroll
        for (int u = 0; u < UNROLL; u++)
#pragma unroll
            for (int r = 0; r < WORLD; r++) {
                int at = r * share + first + u * lanes;
                if (r != rank && first + u * lanes < share && at < packets)
                    parts[u][r] = load(peers[r] + DATA + offset + 16LL * at);
            }
#pragma unroll
        for (int u = 0; u < UNROLL; u++)
#pragma unroll
            for (int r = 0; r < WORLD; r++) {
                int at = r * share + first + u * lanes;
                if (r != rank && first + u * lanes < share && at < packets) store(out + 16LL * at, parts[u][r]);
            }
    }
    meet<2>(peers, rank);
}
