// What libvrdma calls of libdl.so.2, as that was before glibc 2.34.
#include "name.hpp"

OLDER_GLIBC_NAME(dlclose);
OLDER_GLIBC_NAME(dlopen);
OLDER_GLIBC_NAME(dlsym);
OLDER_GLIBC_NAME(dlvsym);
