// Text on the device, byte by byte: a shift of letters, words counted and turned round, a pattern searched for, the edit
// distance of words, and numbers parsed and printed.
//
//   strings [--iterations N] [--sleep-us N] [--progress FILE]      30, 0, none
//
// Prints "digest D" and the text's first line.
#include "rounds.h"

const uint32_t LINE = 64, LINES = 128, N = LINE * LINES;

// Lines of words of letters with a space between, and a newline at the end.
__global__ void write_text(char *text) {
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    uint64_t x = mix(i);
    text[i] = i % LINE == LINE - 1 ? '\n' : x % 6 == 0 ? ' ' : (char)((x & 64 ? 'a' : 'A') + (x >> 8) % 26);
}

__global__ void shift_letters(char *text, int by) {
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    char c = text[i];
    if (c >= 'a' && c <= 'z') {
        c = (char)('a' + (c - 'a' + by) % 26);
    } else if (c >= 'A' && c <= 'Z') {
        c = (char)('A' + (c - 'A' + 26 - by) % 26);
    }
    text[i] = c;
}

// A thread for each line.
__global__ void turn_words(char *text, uint32_t *words) {
    char *line = text + threadIdx.x * LINE;
    uint32_t count = 0;
    for (uint32_t i = 0; i < LINE - 1;) {
        if (line[i] == ' ') {
            i++;
            continue;
        }
        uint32_t end = i;
        while (line[end] != ' ' && line[end] != '\n') {
            end++;
        }
        for (uint32_t a = i, b = end - 1; a < b; a++, b--) {
            char c = line[a];
            line[a] = line[b], line[b] = c;
        }
        count++;
        i = end;
    }
    words[threadIdx.x] += count;
}

__constant__ char pattern[4];

__global__ void find(const char *text, unsigned long long *found) {
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    bool same = true;
    for (uint32_t k = 0; pattern[k] && same; k++) {
        same = i + k < N && (text[i + k] | 32) == pattern[k];
    }
    if (same) {
        atomicAdd(found, (unsigned long long)i + 1);
    }
}

// Between the first 12 letters of neighbouring lines.
__global__ void distances(const char *text, uint32_t *sums) {
    const char *a = text + threadIdx.x * LINE, *b = text + (threadIdx.x + 1) % LINES * LINE;
    unsigned char row[13];
    for (uint32_t i = 0; i < 13; i++) {
        row[i] = (unsigned char)i;
    }
    for (uint32_t i = 1; i < 13; i++) {
        unsigned char diagonal = row[0];
        row[0] = (unsigned char)i;
        for (uint32_t k = 1; k < 13; k++) {
            unsigned char best = (unsigned char)min(min(row[k], row[k - 1]) + 1, diagonal + (a[i - 1] != b[k - 1]));
            diagonal = row[k];
            row[k] = best;
        }
    }
    sums[threadIdx.x] += row[12];
}

__device__ uint32_t parse(const char *digits) {
    uint32_t value = 0;
    for (; *digits >= '0' && *digits <= '9'; digits++) {
        value = value * 10 + (uint32_t)(*digits - '0');
    }
    return value;
}

__global__ void count_up(char (*numbers)[12]) {
    char *digits = numbers[threadIdx.x], reversed[12];
    uint32_t value = parse(digits) * 3 + threadIdx.x, length = 0;
    do {
        reversed[length++] = (char)('0' + value % 10);
    } while (value /= 10);
    for (uint32_t i = 0; i < length; i++) {
        digits[i] = reversed[length - 1 - i];
    }
    digits[length] = 0;
}

int main(int argc, char **argv) {
    Rounds rounds(argc, argv, 30);
    char *text = zeros<char>(N), (*numbers)[12] = (char(*)[12])zeros<char>(LINES * 12);
    uint32_t *words = zeros<uint32_t>(LINES), *sums = zeros<uint32_t>(LINES);
    auto *found = zeros<unsigned long long>(1);
    write_text<<<N / BLOCK, BLOCK>>>(text);
    rounds.run([&](uint64_t round) {
        char wanted[4] = {(char)('a' + round % 26), (char)('a' + round * 7 % 26), 0, 0};
        CHECK(cudaMemcpyToSymbol(pattern, wanted, sizeof wanted));
        shift_letters<<<N / BLOCK, BLOCK>>>(text, (int)(round % 26));
        turn_words<<<1, LINES>>>(text, words);
        find<<<N / BLOCK, BLOCK>>>(text, found);
        distances<<<1, LINES>>>(text, sums);
        count_up<<<1, LINES>>>(numbers);
    });
    char line[LINE];
    CHECK(cudaMemcpy(line, text, LINE, cudaMemcpyDeviceToHost));
    rounds.take_from_device(text, N);
    rounds.take_from_device(words, LINES);
    rounds.take_from_device(sums, LINES);
    rounds.take_from_device(found, 1);
    rounds.take_from_device(&numbers[0][0], LINES * 12);
    int status = rounds.end();
    fwrite(line, 1, LINE, stdout);
    return status;
}
