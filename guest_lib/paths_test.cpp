// Children with libvrdma preloaded: what they see of the device, and that everything else stays as it was. The parent
// is not preloaded.
#include <doctest/doctest.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <sstream>
#include <string>

namespace {

struct Outcome {
  int exit_code = -1;  // -1: killed by a signal or by the watchdog
  std::string out;     // stdout and stderr
};

// Runs a shell line with the library preloaded into everything it starts; a child that does not end is killed after
// 30 s with its process group, and has no exit code then.
Outcome run(const std::string& command, bool preload = true) {
  int ends[2];
  REQUIRE(pipe(ends) == 0);
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    setpgid(0, 0);
    dup2(ends[1], STDOUT_FILENO);
    dup2(ends[1], STDERR_FILENO);
    close(ends[0]);
    close(ends[1]);
    setenv("LC_ALL", "C", 1);
    if (preload) setenv("LD_PRELOAD", VRDMA_LIBRARY, 1);
    execl("/bin/sh", "sh", "-c", command.c_str(), static_cast<char*>(nullptr));
    _exit(127);
  }
  close(ends[1]);
  Outcome outcome;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  for (;;) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
    pollfd waiting{ends[0], POLLIN, 0};
    if (left.count() <= 0 || poll(&waiting, 1, static_cast<int>(left.count())) == 0) {
      kill(-child, SIGKILL);
      outcome.out += "[killed by the watchdog]";
      break;
    }
    char buffer[4096];
    const ssize_t bytes = read(ends[0], buffer, sizeof buffer);
    if (bytes <= 0) break;
    outcome.out.append(buffer, static_cast<std::size_t>(bytes));
  }
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  if (WIFEXITED(status)) outcome.exit_code = WEXITSTATUS(status);
  return outcome;
}

bool real_devices_present() {
  if (access("/sys/class/infiniband", F_OK) != 0 && access("/dev/infiniband", F_OK) != 0) return false;
  MESSAGE("SKIPPED: this machine has RDMA devices of its own");
  return true;
}

bool installed(const char* program) {
  if (access(program, X_OK) == 0) return true;
  MESSAGE("SKIPPED: " << program << " is not installed");
  return false;
}

}  // namespace

TEST_CASE("the shell and coreutils read the device's files") {
  if (real_devices_present()) return;
  const std::string dir = "/sys/class/infiniband/vrdma0";
  CHECK(run("cat " + dir + "/node_type " + dir + "/ports/1/pkeys/0").out == "1: CA\n0xffff\n");
  CHECK(run("read x < " + dir + "/node_type; echo \"$x\"").out == "1: CA\n");
  CHECK(run("grep -c : " + dir + "/node_guid").out == "1\n");
  const std::string state = "cat " + dir + "/ports/1/state " + dir + "/ports/1/phys_state " + dir + "/ports/1/link_layer";
  CHECK(run("unset VRDMA_SOCKET VRDMA_LINK_LAYER VRDMA_SERVED_LINK_LAYER; " + state).out == "1: DOWN\n2: Polling\nInfiniBand\n");
  CHECK(run("export VRDMA_SOCKET=/nowhere VRDMA_LINK_LAYER=ethernet; " + state).out == "4: ACTIVE\n5: LinkUp\nEthernet\n");
  CHECK(run("ulimit -f 0; cat " + dir + "/node_type").out == "1: CA\n");
  CHECK(run("cat " + dir + "/nonexistent").exit_code == 1);
  CHECK(run("cat " + dir + "/device/net").exit_code == 1);
  CHECK(run("echo 1 > " + dir + "/node_type").exit_code != 0);
  CHECK(run("cat " + dir + "/ports/1/gid_attrs/types/9").out == "cat: " + dir + "/ports/1/gid_attrs/types/9: Invalid argument\n");
}

TEST_CASE("what is copied and archived is what stat tells of") {
  if (real_devices_present()) return;
  const std::string state = "/sys/class/infiniband/vrdma0/ports/1/state";
  const std::string folder = "d=$(mktemp -d) && trap 'rm -r \"$d\"' EXIT && unset VRDMA_SOCKET VRDMA_LINK_LAYER VRDMA_SERVED_LINK_LAYER; ";
  CHECK(run(folder + "cp " + state + " $d/state && cat $d/state").out == "1: DOWN\n");
  CHECK(run(folder + "cp -r /sys/class/infiniband/vrdma0/ports/1/pkeys $d && cat $d/pkeys/0").out == "0xffff\n");
  const std::string same = "import os; d = os.open('" + state + "', os.O_RDONLY); print(os.path.samestat(os.stat('" + state + "'), os.fstat(os.dup(d))))";
  if (installed("/usr/bin/python3")) CHECK(run("python3 -c \"" + same + "\"").out == "True\n");
}

TEST_CASE("where a child of vfork goes is no business of its parent's") {
  if (real_devices_present() || !installed("/usr/bin/python3")) return;
  const std::string program = "import os, subprocess as s; d = '/sys/class/infiniband/vrdma0/ports/1'; "
                              "os.chdir('/tmp'); s.run(['true'], cwd=d); print(os.getcwd()); "
                              "os.chdir(d); s.run(['true'], cwd='/'); print(os.getcwd(), open('pkeys/0').read())";
  CHECK(run("python3 -c \"" + program + "\"").out == "/tmp\n/sys/class/infiniband/vrdma0/ports/1 0xffff\n\n");
}

TEST_CASE("listings show the tree") {
  if (real_devices_present()) return;
  CHECK(run("ls /sys/class/infiniband").out == "vrdma0\n");
  CHECK(run("ls /sys/class/infiniband/vrdma0/device").out == "local_cpulist\nlocal_cpus\nnet\nnuma_node\n");
  CHECK(run("ls /sys/class/infiniband/vrdma0/device/net").out == "lo\n");
  CHECK(run("ls /dev/infiniband").out == "rdma_cm\numad0\nuverbs0\n");
  CHECK(run("echo /sys/class/infiniband/*/ports").out == "/sys/class/infiniband/vrdma0/ports\n");
  CHECK(run("echo /sys/class/infiniband/*", false).out == "/sys/class/infiniband/*\n");
  const Outcome listing = run("ls -lR /sys/class/infiniband");
  CHECK(listing.exit_code == 0);
  CHECK(listing.out.find("gid_attrs") != std::string::npos);
}

TEST_CASE("programs that open directories walk through the tree") {
  if (real_devices_present()) return;
  CHECK(run("find /sys/class/infiniband -name lid | xargs cat").out == "0x0\n");
  CHECK(run("find /dev/infiniband -type c | sort").out == "/dev/infiniband/rdma_cm\n/dev/infiniband/umad0\n/dev/infiniband/uverbs0\n");
  CHECK(run("find /sys/class/infiniband -name device -exec cat {}/../node_type ';'").out == "1: CA\n");
  CHECK(run("grep -rs . /sys/class/infiniband/vrdma0/ports/1/gid_attrs").out == "/sys/class/infiniband/vrdma0/ports/1/gid_attrs/types/0:IB/RoCE v1\n");
  CHECK(run("cat /sys/class/infiniband").out == "cat: /sys/class/infiniband: Is a directory\n");
  if (installed("/usr/bin/python3"))
    CHECK(run("python3 -c 'import os; print(sum(len(d[2]) for d in os.fwalk(\"/sys/class/infiniband\")) == sum(len(d[2]) for d in os.walk(\"/sys/class/infiniband\")) > 50)'").out ==
          "True\n");
}

TEST_CASE("folder_descriptors_test.cpp, preloaded") {
  if (real_devices_present()) return;
  char self[512] = {};
  REQUIRE(readlink("/proc/self/exe", self, sizeof self - 1) > 0);
  const Outcome outcome = run(std::string(self) + " --no-skip --test-suite=preloaded");
  INFO(outcome.out);
  CHECK(outcome.exit_code == 0);
  CHECK(outcome.out.find("10 passed | 0 failed") != std::string::npos);
}

TEST_CASE("the tree can be walked through from within") {
  if (real_devices_present()) return;
  const std::string enter = "cd /sys/class/infiniband && ";
  CHECK(run(enter + "pwd && echo * && cat vrdma0/node_type && ls vrdma0/device").out ==
        "/sys/class/infiniband\nvrdma0\n1: CA\nlocal_cpulist\nlocal_cpus\nnet\nnuma_node\n");
  CHECK(run(enter + "cd vrdma0/ports && pwd -P && cd ../.. && pwd -P && cd .. && pwd -P").out ==
        "/sys/class/infiniband/vrdma0/ports\n/sys/class/infiniband\n/sys/class\n");
  CHECK(run(enter + "(cd vrdma0 && cat hca_type); /bin/pwd; cd /tmp && /bin/pwd && ls vrdma0").out.starts_with("vrdma\n/sys/class/infiniband\n/tmp\nls: "));
  CHECK(run("cd /sys/class/infiniband/vrdma0/node_guid").exit_code != 0);
  CHECK(run("cd /sys/class/infiniband/nonexistent").exit_code != 0);
  // Where the name of a folder of the tree is only a variable, nothing moves.
  CHECK(run("cd /tmp && PWD=/sys/class/infiniband /bin/pwd -P").out == "/tmp\n");
  if (installed("/usr/sbin/ibstatus")) CHECK(run("/usr/sbin/ibstatus").out.starts_with("Infiniband device 'vrdma0' port 1 status:\n"));
}

TEST_CASE("the verbs device is a character device that may be read and written") {
  if (real_devices_present()) return;
  CHECK(run("test -c /dev/infiniband/uverbs0").exit_code == 0);
  CHECK(run("test -r /dev/infiniband/uverbs0 && test -w /dev/infiniband/uverbs0").exit_code == 0);
  CHECK(run("stat -c '%F %t:%T' /dev/infiniband/uverbs0").out == "character special file e7:c0\n");
  CHECK(run("test -d /sys/class/infiniband/vrdma0").exit_code == 0);
  CHECK(run("test -f /sys/class/infiniband/vrdma0/node_guid").exit_code == 0);
  CHECK(run("test -e /dev/infiniband/uverbs1").exit_code == 1);
  CHECK(run("test -e /sys/class/infiniband/vrdma0/device/net/eth0").exit_code == 1);
  CHECK(run("realpath /sys/class/infiniband/vrdma0/device").out == "/sys/class/infiniband/vrdma0/device\n");
  const Outcome opened = run("cat /dev/infiniband/uverbs0");
  CHECK(opened.exit_code == 1);
  CHECK(opened.out.find("No such device or address") != std::string::npos);
}

// Programs look for an adapter's bus address so.
TEST_CASE("a path that leaves the tree by .. leads on") {
  if (real_devices_present()) return;
  for (const char* path : {"/sys/class/infiniband/vrdma0/../..", "/sys/class/infiniband/..", "/sys/class/infiniband/vrdma0/ports/../../../"}) {
    const std::string named = path;
    INFO(named);
    CHECK(run("realpath " + named).out == "/sys/class\n");
    CHECK(run("stat -c %F " + named + " && test -e " + named + "/net && echo net").out == "directory\nnet\n");
  }
  CHECK(run("cat /sys/class/infiniband/nobody/../../net/lo/address").exit_code != 0);
}

TEST_CASE("other interfaces to files see the tree too") {
  if (real_devices_present() || !installed("/usr/bin/python3")) return;
  CHECK(run("python3 -c 'import os; print(sorted(os.listdir(\"/dev/infiniband\")), "
            "[e.is_dir() for e in os.scandir(\"/sys/class/infiniband\")], "
            "os.path.exists(\"/sys/class/infiniband/vrdma0/device/net\"), "
            "open(\"/sys/class/infiniband/vrdma0/ports/1/link_layer\").read().strip())'")
            .out == "['rdma_cm', 'umad0', 'uverbs0'] [True] True InfiniBand\n");
  // A C program's calls that no shell tool makes: fopen, scandir, __open_2, statx with an unrelated path.
  const Outcome c_calls = run(
      "python3 - <<'E'\n"
      "import ctypes, os\n"
      "c = ctypes.CDLL(None, use_errno=True)\n"
      "c.fopen.restype = ctypes.c_void_p\n"
      "f = c.fopen(b'/sys/class/infiniband/vrdma0/fw_ver', b'r')\n"
      "b = ctypes.create_string_buffer(64); c.fgets.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_void_p]\n"
      "c.fgets(b, 64, f); print(b.value)\n"
      "l = ctypes.c_void_p(); print(c.scandir(b'/dev/infiniband', ctypes.byref(l), None, None))\n"
      "print(os.read(c.__open_2(b'/sys/class/infiniband/vrdma0/hw_rev', 0), 9))\n"
      "print(c.open(None, 0), ctypes.get_errno(), c.access(None, 0), ctypes.get_errno())\n"
      "E");
  CHECK(c_calls.out == "b'0.1.0\\n'\n5\nb'1\\n'\n-1 14 -1 14\n");
}

TEST_CASE("A host's ibacm is not there, and other sockets are") {
  if (!installed("/usr/bin/python3")) return;
  CHECK(run("python3 - <<'E'\n"
            "import socket, tempfile\n"
            "folder = tempfile.TemporaryDirectory()\n"
            "other = folder.name + '/ibacm.sock'\n"
            "listener = socket.socket(socket.AF_UNIX); listener.bind(other); listener.listen()\n"
            "for path in ('/run/ibacm.sock', '/var/run/ibacm.sock', '/run/ibacm', other, '\\0/run/ibacm.sock'):\n"
            "  print(socket.socket(socket.AF_UNIX).connect_ex(path))\n"
            "E").out == "111\n111\n2\n0\n111\n");
}

TEST_CASE("rdma(8) finds the device, and what else there is by netlink stays") {
  if (real_devices_present() || !installed("/usr/bin/rdma")) return;
  CHECK(run("rdma link show").out ==
        "link vrdma0/1 subnet_prefix fe80:0000:0000:0000 lid 0 sm_lid 0 lmc 0 state DOWN physical_state POLLING netdev lo \n");
  CHECK(run("VRDMA_LINK_LAYER=ethernet rdma link show vrdma0/1").out == "link vrdma0/1 state DOWN physical_state POLLING netdev lo \n");
  std::string device = run("rdma dev show").out;
  if (const auto protocol = device.find("protocol ib "); protocol != device.npos) device.erase(protocol, 12);  // newer ones say it
  CHECK(device == "0: vrdma0: node_type ca fw 0.1.0 node_guid 0200:00ff:fe00:0001 sys_image_guid 0200:00ff:fe00:0001 \n");
  CHECK(run("rdma system show").out.starts_with("netns shared"));
  const Outcome refused = run("rdma link add rxe0 type rxe netdev lo");
  CHECK(refused.exit_code > 0);
  CHECK(refused.out == "error: Operation not supported\n");
  for (const char* command : {"ip -o link show lo", "ip route show table local 127.0.0.1"}) {
    INFO(std::string(command));
    CHECK(run(command).out == run(command, false).out);
  }
  // Requests as few programs make them: one that names no device, one that is cut off, two in a datagram by pieces, and a socket of the protocol that
  // stands for this one here.
  const Outcome raw = run(
      "python3 - <<'E'\n"
      "import socket, struct\n"
      "s = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 20)\n"
      "s.settimeout(10)\n"
      "def ask(flags, command, attributes=b'', number=1): return struct.pack('=IHHII', 16 + len(attributes), (5 << 10) + command, flags, number, 0) + attributes\n"
      "def told():\n"
      "  bytes, _ = s.recvfrom(4096)\n"
      "  length, type, flags, number, port = struct.unpack_from('=IHHII', bytes)\n"
      "  assert length <= len(bytes) and port == s.getsockname()[0]\n"
      "  return type, number, struct.unpack_from('=i', bytes, 16)[0] if type in (2, 3) else None\n"
      "s.sendto(ask(5, 5), (0, 0)); print(told())\n"
      "s.sendto(b'x' * 20, (0, 0)); s.sendto(ask(5, 1)[:12], (0, 0))\n"
      "s.sendmsg([ask(0x301, 1, number=7)[:10], ask(0x301, 1, number=7)[10:] + ask(1, 9, number=8)], [], 0, (0, 0))\n"
      "print(told(), told(), told())\n"
      "s.sendto(ask(5, 5, struct.pack('=HHIHHI', 8, 1, 0, 8, 3, 1)), (0, 0)); print(told(), told())\n"
      "s.send(ask(1, 1, struct.pack('=HHI', 8, 1, 0))); print(told()); m = ask(1, 1, struct.pack('=HHI', 8, 1, 9)); s.sendmsg([m[:16], m[16:]]); print(told())\n"
      "try: s.sendmsg([b'y' * 5000], [], 0, (0, 0))\n"
      "except OSError as e: print(e.errno)\n"
      "E");
  CHECK(raw.out == "(2, 1, -22)\n(5121, 7, None) (3, 7, 0) (2, 8, -95)\n(5125, 1, None) (2, 1, 0)\n(5121, 1, None)\n(2, 1, -22)\n90\n");
  CHECK(run("python3 -c 'import socket; s = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 2); s.bind((0, 0)); s.sendto(b\"x\", (0, 0))'").out.find(
            "Connection refused") != std::string::npos);
}

TEST_CASE("A socket of NETLINK_RDMA is answered also where no descriptor is left, and where its queue is full sending says so") {
  if (real_devices_present() || !installed("/usr/bin/python3")) return;
  for (const char* limit : {"(resource.RLIMIT_NOFILE, (s.fileno() + 1,) * 2)", "(resource.RLIMIT_AS, (65536,) * 2)"}) {
    const Outcome outcome = run(
        "python3 - <<'E'\n"
        "import resource, socket, struct\n"
        "s = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 20)\n"
        "s.settimeout(10)\n"
        "ask = struct.pack('=IHHII', 16, (5 << 10) + 1, 0x301, 1, 0)\n"
        "sent, told = -1, bytearray(4096)\n"
        "resource.setrlimit" + std::string(limit) + "\n"
        "s.sendto(ask, (0, 0)); s.recv_into(told); print(told[4:6].hex())\n"
        "s.recv_into(told); print(told[4:6].hex())\n"
        "try:\n"
        "  for sent in range(100000): s.sendto(ask, (0, 0))\n"
        "except OSError as e: print({12: 105}.get(e.errno, e.errno))\n"
        "for i in range(2 * sent): s.recv_into(told)\n"
        "E");
    INFO(std::string(limit));
    CHECK(outcome.exit_code == 0);
    CHECK(outcome.out == (std::string(limit).find("NOFILE") != std::string::npos ? "0114\n0300\n24\n" : "0114\n0300\n105\n"));
  }
}

TEST_CASE("everything outside the prefixes is as without the library") {
  for (const char* command :
       {"ls /", "ls /sys/class", "cat /etc/hostname", "test -c /dev/null && echo yes", "ls -d /dev/infinibandx",
        "stat -c %F /proc/self /tmp /dev/zero", "realpath /proc/../etc/passwd", "find /etc/apt -name '*.list' | sort",
        "readlink /proc/self/exe"}) {
    INFO(std::string(command));
    const Outcome with = run(command), without = run(command, false);
    CHECK(with.out == without.out);
    CHECK(with.exit_code == without.exit_code);
  }
}

TEST_CASE("files are created with the mode that was asked for") {
  const Outcome modes = run(
      "d=$(mktemp -d) && cd $d && umask 0 && python3 - <<'E'\n"
      "import os, stat\n"
      "show = lambda fd: print(oct(stat.S_IMODE(os.fstat(fd).st_mode)))\n"
      "show(os.open('created', os.O_CREAT | os.O_WRONLY, 0o640))\n"
      "show(os.open('.', os.O_TMPFILE | os.O_RDWR, 0o604))\n"
      "show(os.open('at', os.O_CREAT | os.O_WRONLY, 0o751, dir_fd=os.open('.', os.O_DIRECTORY)))\n"
      "E\n"
      "cd / && rm -r $d");
  CHECK(modes.out == "0o640\n0o604\n0o751\n");
}

TEST_CASE("programs of rdma_cm end where there is no service") {
  if (real_devices_present()) return;
  for (const char* command : {"/usr/bin/rping -s", "/usr/bin/ucmatose", "/usr/bin/rping -c -a 127.0.0.1",
                              "/usr/bin/udaddy", "/usr/bin/rdma_server"}) {
    if (!installed(std::string(command).substr(0, std::string(command).find(' ')).c_str())) continue;
    const Outcome outcome = run(command);
    INFO(std::string(command) << ": " << outcome.out);
    CHECK(outcome.exit_code > 0);
  }
  const Outcome shell = run("exec 3<>/dev/infiniband/rdma_cm");
  CHECK(shell.exit_code != 0);
  CHECK(shell.out.find("No such device") != std::string::npos);
}
