// What a libstdc++ made for a newer C library than the one that programs are linked against calls: harmless stand-ins.
#include <stddef.h>
#include <stdint.h>
#include <sys/random.h>

// "There may be other threads."
char __libc_single_threaded;

uint32_t arc4random(void) {
    uint32_t number = 0;
    while (getrandom(&number, sizeof number, 0) != (ssize_t)sizeof number) {
    }
    return number;
}

// "Not found": the unwinder then asks dl_iterate_phdr.
int _dl_find_object(void *address, void *result) {
    (void)address;
    (void)result;
    return -1;
}
