/* The header as the one file sees it that holds the implementation. A second time, as when another
   header includes it too, brings nothing new. */
#define MPTRAIN_IMPLEMENTATION
#include "mptrain.h"
#include "mptrain.h"
