/* The implementation after a header of the C library: fine by default, and in strict C99, where the
   library's POSIX part is hidden by then, a message that says what to do. */
#include <stdio.h>

#define MPTRAIN_IMPLEMENTATION
#include "mptrain.h"
