// What a file system is to who maps files of it. Any thread.
#pragma once

#include <linux/magic.h>

namespace vmci {

// f_type of statfs(2): a page comes when somebody else answers, and who touches it waits for that. (Those of networks are not all in
// linux/magic.h.)
constexpr bool served_by_others(long type) {
  constexpr unsigned fuse = 0x65735546, cifs = 0xff534d42, smb2 = 0xfe534d42, ceph = 0x00c36400;
  switch (static_cast<unsigned>(type)) {
    case fuse:
    case cifs:
    case smb2:
    case ceph:
    case NFS_SUPER_MAGIC:
    case V9FS_MAGIC:
    case AFS_SUPER_MAGIC:
    case AFS_FS_MAGIC:
    case CODA_SUPER_MAGIC: return true;
    default: return false;
  }
}

}  // namespace vmci
