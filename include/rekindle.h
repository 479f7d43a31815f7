/* What a program may tell Rekindle. Nothing to link: a program that calls this runs without Rekindle too.
 *
 *     for (;;) {
 *         rekindle_checkpoint();      // at the start of an iteration, where little of what is copied is written soon
 *         ...
 *     }
 *
 * SPDX-License-Identifier: MIT OR Apache-2.0
 */
#ifndef REKINDLE_H
#define REKINDLE_H

#include <dlfcn.h>
#include <stddef.h>

/* "If a checkpoint is wanted, now is a good moment." Where nobody waits (`rekindle checkpoint --at-moment`) this is a look
 * at one word of memory. Where somebody does, the checkpoint begins: the GPU memory in it is that of this moment, and the
 * call returns when that is certain: mostly after milliseconds, and after a second also where it is not, since processes
 * may wait for each other. It does not wait for the copy.
 *
 * Returns 1 if a checkpoint has begun, 0 otherwise: nobody waits, CUDA is not in use yet, or there is no Rekindle. */
static inline int rekindle_checkpoint(void)
{
    static int (*found)(void);
    int (*call)(void) = __atomic_load_n(&found, __ATOMIC_ACQUIRE);
    if (!call) {
        void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
        void *symbol = library ? dlsym(library, "rekindle_checkpoint") : NULL;
        if (library)
            dlclose(library);
        if (!symbol)
            return 0;
        *(void **)&call = symbol;
        __atomic_store_n(&found, call, __ATOMIC_RELEASE);
    }
    return call();
}

#endif
