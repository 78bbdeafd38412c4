// Replays recorded calls of the kernels, for processors without torch: replay CALLS RESULTS.
//
// All numbers of CALLS are 64-bit integers. A call is: the index of its function; the number of buffers; size and bytes of
// each; the number of arguments; a pair for each: the index of a buffer and an offset in bytes, or -1 and a number (the
// bits of a double for a floating-point one, 0 for a null pointer). RESULTS has, for each call, what the function returned
// and the bytes of all buffers afterwards.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

struct Argument {
    char* pointer;
    std::int64_t number;
    operator void*() const { return pointer; }
    operator long() const { return number; }
    operator int() const { return static_cast<int>(number); }
    operator float() const {
        double value;
        std::memcpy(&value, &number, sizeof value);
        return static_cast<float>(value);
    }
};

// Generated: std::int64_t call(std::int64_t index, const Argument* a).
#include "calls.h"

extern "C" const char* longspan_isa();

int main(int count, char** names) {
    if (count != 3) return 2;
    std::FILE *calls = std::fopen(names[1], "rb"), *results = std::fopen(names[2], "wb");
    if (!calls || !results) return 3;
    const auto read = [&](void* place, std::size_t size) {
        if (size && std::fread(place, size, 1, calls) != 1) std::exit(4);
    };
    const auto number = [&] {
        std::int64_t value;
        read(&value, sizeof value);
        return value;
    };
    std::int64_t index;
    while (std::fread(&index, sizeof index, 1, calls) == 1) {
        // The size of each is its own, so that a sanitizer or an emulator can see what is beyond.
        std::vector<std::vector<char>> buffers(number());
        for (auto& buffer : buffers) {
            buffer.resize(number());
            read(buffer.data(), buffer.size());
        }
        std::vector<Argument> arguments(number());
        for (auto& argument : arguments) {
            const std::int64_t buffer = number();
            argument.number = number();
            argument.pointer = buffer < 0 ? nullptr : buffers[buffer].data() + argument.number;
        }
        const std::int64_t result = call(index, arguments.data());
        std::fwrite(&result, sizeof result, 1, results);
        for (const auto& buffer : buffers) std::fwrite(buffer.data(), 1, buffer.size(), results);
    }
    std::printf("%s\n", longspan_isa());
    return std::fclose(results) ? 5 : 0;
}
