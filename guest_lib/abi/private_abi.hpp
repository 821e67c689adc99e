// Functions of libibverbs that its public headers no longer declare, but that librdmacm and the providers import.
// Any thread may call them; none of them needs the host service.
#pragma once

#include <infiniband/verbs.h>
#include <infiniband/sa.h>
#include <rdma/ib_user_sa.h>
#include <rdma/ib_user_verbs.h>

#include <cstddef>

extern "C" {
// The root of sysfs without trailing slashes: $SYSFS_PATH, or "/sys" when it is unset or the process runs with
// privileges its caller lacks. The first answer is kept for the life of the process.
const char* ibv_get_sysfs_path(void);

// Reads dir/file into buf, strips one trailing newline and terminates the text. Returns its length, or -1 with errno.
// A text that leaves no room for the terminator is -1.
int ibv_read_sysfs_file(const char* dir, const char* file, char* buf, std::size_t size);

// Field by field between the kernel's marshalled structs and those of verbs.h; the destination's reserved bytes stay
// as they were, and so does ibv_qp_attr::qp_state.
void ibv_copy_ah_attr_from_kern(ibv_ah_attr* dst, ib_uverbs_ah_attr* src);
void ibv_copy_qp_attr_from_kern(ibv_qp_attr* dst, ib_uverbs_qp_attr* src);
void ibv_copy_path_rec_from_kern(ibv_sa_path_rec* dst, ib_user_path_rec* src);
void ibv_copy_path_rec_to_kern(ib_user_path_rec* dst, ibv_sa_path_rec* src);
}
