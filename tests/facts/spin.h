// A kernel that runs until the host says so, and a thread that says so in the end whatever happens: so a call that waits
// for the kernel returns late rather than never.
#pragma once

#include "facts.h"

// Sets a word after some time unless it is told before that it need not.
struct Watchdog {
    volatile uint32_t *word;
    double until;
    bool enough = false, has_bitten = false;
    Thread thread;

    Watchdog(volatile uint32_t *what, double limit_ms)
        : word(what), until(now_ns() + limit_ms * 1e6), thread([this] { wait(); }) {}
    void wait() {
        while (!look(enough)) {
            if (now_ns() > until) {
                tell(has_bitten, true);
                *word = 1;
                return;
            }
            sleep_us(500);
        }
    }
    // Whether it has set the word.
    bool call_off() {
        tell(enough, true);
        return look(has_bitten);
    }
    ~Watchdog() { tell(enough, true); }
};

static __global__ void spin_until(volatile uint32_t *words) {
    words[1] = 1;
    while (words[0] == 0) {
    }
}

// words[0]: the kernel may end. words[1]: it has begun.
inline volatile uint32_t *new_spin_words() { return (volatile uint32_t *)new_pinned(4096); }

// Loads the kernel's code.
inline void warm_up_spin(CUstream stream, volatile uint32_t *words) {
    words[0] = 1;
    spin_until<<<1, 1, 0, stream>>>(words);
    NEED(cuStreamSynchronize, stream);
    words[0] = words[1] = 0;
}

inline void wait_for_begin(volatile uint32_t *words) {
    double limit = now_ns() + 10e9;
    while (words[1] == 0) {
        REQUIRE(now_ns() < limit);
    }
}
