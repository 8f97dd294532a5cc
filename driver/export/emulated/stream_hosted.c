/* The bridge's stream where there are processes: standard input and output. */

#include <stdio.h>
#include <stdlib.h>

#include "celosia_bridge.h"

void celosia_bridge_get(void *bytes, size_t size) {
    fflush(stdout);
    if (size && fread(bytes, 1, size, stdin) != size) exit(1);
}

void celosia_bridge_put(const void *bytes, size_t size) {
    if (size && fwrite(bytes, 1, size, stdout) != size) exit(1);
}
