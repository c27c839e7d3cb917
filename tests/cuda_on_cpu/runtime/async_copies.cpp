// cp.async: the copies of a thread wait in a list until the thread waits for them.
#include "internal.h"

namespace cuda_on_cpu {

void begin_copy(void *to, const void *from, Where where) {
    if (!aligned(to, COPY_BYTES) || (from && !aligned(from, COPY_BYTES)))
        fault("cp.async with an address that is not a multiple of 16 bytes", where);
    Thread &thread = *current;
    if (thread.num_copies == MAX_COPIES)
        fault("more asynchronous copies of one thread in flight than the runner holds", where);
    memset(to, POISON, COPY_BYTES);
    thread.copies[thread.num_copies++] = {to, from, thread.open_group};
}

void finish_copies(int groups) {
    Thread &thread = *current;
    int kept = 0;
    for (int i = 0; i < thread.num_copies; i++) {
        const AsyncCopy &copy = thread.copies[i];
        if (copy.group >= groups) thread.copies[kept++] = copy;
        else if (copy.from) memcpy(copy.to, copy.from, COPY_BYTES);
        else memset(copy.to, 0, COPY_BYTES);
    }
    thread.num_copies = kept;
}

} // namespace cuda_on_cpu
