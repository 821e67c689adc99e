// What libvrdma, and the static libstdc++ in it, call of libpthread.so.0, as that was before glibc 2.34.
#include "name.hpp"

OLDER_GLIBC_NAME(pthread_attr_setstacksize);
OLDER_GLIBC_NAME(pthread_create);
OLDER_GLIBC_NAME(pthread_detach);
OLDER_GLIBC_NAME(pthread_join);
OLDER_GLIBC_NAME(__pthread_key_create);
OLDER_GLIBC_NAME(pthread_mutex_timedlock);
OLDER_GLIBC_NAME(pthread_mutex_trylock);
OLDER_GLIBC_NAME(pthread_once);
OLDER_GLIBC_NAME(pthread_sigmask);
OLDER_GLIBC_NAME(pthread_testcancel);
