// A function that the linker finds in a library, and that nobody will ever call there.
#pragma once

#define OLDER_GLIBC_NAME(name) asm(".globl " #name "\n.type " #name ", %function\n" #name ":\n")
