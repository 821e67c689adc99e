# Debian packages that ./run and ./test need, and need_packages to have them. Sourced by bash; contacts nobody when all are there.

build_packages=(g++ cmake ninja-build boost nlohmann-json3-dev libfmt-dev libspdlog-dev libcli11-dev libibverbs-dev libssl-dev)
[ "$(uname -m)" = x86_64 ] && build_packages+=(libipsec-mb-dev)  # elsewhere OpenSSL does its work
# The programs whose traffic is shown, and the interpreter of the harness.
run_packages=("${build_packages[@]}" python3 ibverbs-utils perftest)
test_packages=("${run_packages[@]}" doctest-dev clang libclang-rt-dev lld rdma-core rdmacm-utils infiniband-diags python3-pyverbs ibverbs-providers qperf ucx-utils libucx-dev openmpi-bin python3-mpi4py iperf3 gnuplot-nox bubblewrap iproute2 dpkg-dev
               qemu-system-x86 cpio libxml2-utils debootstrap debian-archive-keyring etcd-server etcd-client openssl podman runc)
[ "$(uname -m)" = x86_64 ] && test_packages+=(user-mode-linux)  # for other processors there is none
command -v busybox >/dev/null 2>&1 || test_packages+=(busybox-static)  # either of Debian's two, which exclude each other

boost_at_least=1.81
unpacked_boost=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/build/boost/usr

installed() { [ "$(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null)" = installed ]; }

# "boost" stands for the newest libboost1.N-dev; Debian 12's libboost-dev is older than what we need.
installed_boosts() {
  dpkg-query -W -f '${binary:Package} ${db:Status-Status}\n' 'libboost1.*-dev' 2>/dev/null | awk '$2 == "installed" { sub(/:.*/, "", $1); print $1 }'
}
boost_installed() { [ -e "$unpacked_boost/include/boost/version.hpp" ] || installed_boosts | newest_boost | grep -q .; }
# unpack_here PACKAGE: what it would install, into this folder. The sandbox user of apt could not write to it.
unpack_here() { timeout 120 apt-get -qq -o APT::Sandbox::User=root download "$1" && dpkg -x "$1"_*.deb .; }
# unpack_boost PACKAGE: where an older one is installed, which the newer one would have removed. We need its headers only.
unpack_boost() (
  folder=${unpacked_boost%/usr}
  mkdir -p "${folder%/*}" && partial=$(mktemp -d "$folder.XXXXXX") || return 1
  trap 'rm -rf "$partial"' EXIT
  cd "$partial" && unpack_here "$1" && rm -- *.deb && chmod 755 . && mv -T "$partial" "$folder"
)
newest_boost() {
  sed -n 's/^libboost\(1\.[0-9]\+\)-dev$/\1/p' | sort -V | while read -r version; do
    dpkg --compare-versions "$version" ge "$boost_at_least" && echo "libboost$version-dev"
  done | tail -n 1
}

# apt_get ARGUMENT...: as root, or through sudo.
apt_get() {
  local as_root=()
  if [ "$(id -u)" -ne 0 ]; then
    if ! command -v sudo >/dev/null 2>&1; then
      echo "missing packages: ${missing[*]}" >&2
      echo "Installing them needs root, and there is no sudo: run once as root  apt-get install --no-install-recommends ${missing[*]}" >&2
      return 1
    fi
    as_root=(sudo)
    [ -t 0 ] || as_root=(sudo -n)
  fi
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=120 "$@" </dev/null
}

# need_packages NAME...: installs those that are missing.
need_packages() {
  local missing=() name newest
  if ! command -v dpkg-query >/dev/null 2>&1; then
    echo "note: no dpkg here, so nothing is installed; needed are the equivalents of Debian's: $*" >&2
    return 0
  fi
  for name in "$@"; do
    if [ "$name" = boost ]; then boost_installed || missing+=(boost)
    else installed "$name" || missing+=("$name"); fi
  done
  [ "${#missing[@]}" -gt 0 ] || return 0

  # The lists are fetched only when they do not name all that is missing.
  local known=1
  for name in "${missing[@]}"; do
    if [ "$name" = boost ]; then newest=$(apt-cache pkgnames libboost1. | newest_boost); [ -n "$newest" ] || known=0
    else [ -n "$(apt-cache policy "$name" 2>/dev/null | awk '/Candidate:/ && $2 != "(none)"')" ] || known=0; fi
  done
  echo "installing: ${missing[*]}"
  [ "$known" = 1 ] || apt_get -qq update || return 1
  if [[ " ${missing[*]} " == *" boost "* ]]; then
    newest=$(apt-cache pkgnames libboost1. | newest_boost)
    if [ -z "$newest" ]; then
      echo "this distribution has no Boost of $boost_at_least or newer: use Debian 12, Ubuntu 24.04 or later" >&2
      return 1
    fi
    for name in "${!missing[@]}"; do
      [ "${missing[$name]}" = boost ] || continue
      if installed_boosts | grep -q . && unpack_boost "$newest"; then unset "missing[$name]"; else missing[$name]=$newest; fi
    done
    [ "${#missing[@]}" -gt 0 ] || return 0
  fi
  local command=(-qq install -y --no-install-recommends --no-remove "${missing[@]}")
  # Lists that know a package may be too old to fetch it: once more with fresh ones.
  apt_get "${command[@]}" >/dev/null && return 0
  [ "$known" = 1 ] && apt_get -qq update && apt_get "${command[@]}" >/dev/null
}

# fetch_stock_kernel FOLDER: the package of Debian's own kernel, into a folder; it is not installed. Fails where there is none.
fetch_stock_kernel() (
  mkdir -p "$1" && cd "$1" || return 1
  if ls linux-image-*.deb >/dev/null 2>&1; then return 0; fi
  partial=$(mktemp -d partial.XXXXXX) || return 1
  trap 'rm -rf "$PWD/$partial"' EXIT
  download() {
    # What the meta-package stands for. The sandbox user of apt could not write to this folder.
    name=$(apt-cache depends linux-image-amd64 2>/dev/null | sed -n 's/^ *Depends: \(linux-image-[0-9].*\)/\1/p' | head -n 1)
    [ -n "$name" ] && (cd "$partial" && timeout 240 apt-get -qq -o APT::Sandbox::User=root download "$name")
  }
  refresh() { [ "$(id -u)" -eq 0 ] || command -v sudo >/dev/null && apt_get -qq update; }
  # Lists that know it may be too old to fetch it, or not be there at all.
  download 2>/dev/null || { refresh && download; } || { echo "no stock kernel: apt has no linux-image-amd64 to download" >&2; return 1; }
  mv "$partial"/linux-image-*.deb .
)

# fetch_libvirt_schemas FOLDER: the schemas of libvirt's documents, from its package, into a folder; nothing is installed.
fetch_libvirt_schemas() (
  mkdir -p "$1" && cd "$1" || return 1
  [ ! -e schemas/domain.rng ] || return 0
  partial=$(mktemp -d partial.XXXXXX) || return 1
  trap 'rm -rf "$PWD/$partial"' EXIT
  # Debian 12 has them in libvirt0, later ones in libvirt-common.
  for name in libvirt-common libvirt0; do
    (cd "$partial" && unpack_here "$name" 2>/dev/null) || continue
    [ -e "$partial/usr/share/libvirt/schemas/domain.rng" ] || continue
    mv -T "$partial/usr/share/libvirt/schemas" schemas 2>/dev/null || [ -e schemas/domain.rng ]
    return
  done
  echo "no schemas of libvirt: apt has neither libvirt-common nor libvirt0 with them" >&2
  return 1
)

# build_preset PRESET [TARGET...]: with ccache, where it is installed.
build_preset() {
  local preset=$1 log
  shift
  if command -v ccache >/dev/null 2>&1; then
    export CMAKE_C_COMPILER_LAUNCHER=ccache CMAKE_CXX_COMPILER_LAUNCHER=ccache CCACHE_BASEDIR=$PWD CCACHE_NOHASHDIR=1
  fi
  [ ! -e "$unpacked_boost" ] || export BOOST_ROOT=$unpacked_boost
  mkdir -p build
  log=build/$preset.log
  if ! cmake --preset "$preset" >"$log" 2>&1 || ! cmake --build --preset "$preset" -j "$(nproc)" ${1:+--target "$@"} >>"$log" 2>&1; then
    tail -n 40 "$log" >&2
    echo "building \"$preset\" failed: the whole of it is in $log" >&2
    return 1
  fi
}
