// Which keys each query of a tile of sorted tokens sees: those of its bucket in its chunk or some chunks before, which have
// equal or slightly larger codes, unless the query has seen them in an earlier round.
#include <cstdint>

namespace {

struct Sizes {
    long rounds, each, slots, tiles, size, width, back, reach;
};

// One row of queries of a tile against one block of keys: codes of this round and of earlier ones, strided by slots.
inline void row(const std::int32_t* codes, long ahead, long key, long query, std::int32_t ask, const Sizes& s,
                const std::uint8_t* band, std::uint8_t* seen) {
    const std::int32_t reach = static_cast<std::int32_t>(s.reach);
    const std::int32_t* now = codes + (s.rounds - 1) * ahead + key;
    const std::int32_t least = ask - reach;
    for (long j = 0; j < s.size; ++j) seen[j] = band[j] & static_cast<std::uint8_t>(now[j] >= least);
    for (long r = 0; r + 1 < s.rounds; ++r) {
        const std::int32_t* before = codes + r * ahead + key;
        const std::int32_t own = codes[r * ahead + query];
        for (long j = 0; j < s.size; ++j) {
            const std::int32_t apart = own - before[j];
            seen[j] &= static_cast<std::uint8_t>((apart > reach) | (apart < -reach));
        }
    }
}

}  // namespace

// codes (R,G,slots), those of the earlier rounds and, last, of this one; asks (G,tiles size), this round's codes of queries;
// band (width,size,size), which pairs the order of slots allows; seen (G,tiles,width,size,size). sizes: R, G, slots, tiles,
// size, width, back, reach: tile t of queries begins at slot (back + t) size and reads the blocks of keys from t on.
extern "C" void longspan_buckets_seen(const std::int32_t* codes, const std::int32_t* asks, const std::uint8_t* band,
                                      std::uint8_t* seen, const long* sizes, int threads) {
    const Sizes s{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6], sizes[7]};
    const long ahead = s.each * s.slots, units = s.each * s.tiles;
#pragma omp parallel for num_threads(threads) if (threads > 1 && units > 1)
    for (long unit = 0; unit < units; ++unit) {
        const long head = unit / s.tiles, tile = unit % s.tiles, begin = head * s.slots;
        for (long b = 0; b < s.width; ++b)
            for (long i = 0; i < s.size; ++i) {
                const long at = (unit * s.width + b) * s.size + i;
                row(codes, ahead, begin + (tile + b) * s.size, begin + (s.back + tile) * s.size + i, asks[unit * s.size + i],
                    s, band + (b * s.size + i) * s.size, seen + at * s.size);
            }
    }
}
