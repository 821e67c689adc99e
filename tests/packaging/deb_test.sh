#!/bin/bash
# deb_test.sh BUILD_FOLDER: packs the build as a Debian package, then installs, uses, removes and purges it in an overlay over
# this machine's root, so that the machine itself stays as it is. Needs root and overlayfs for that; without them
# it unpacks the package and uses it from where it lies, and says what it left out. Exit code 77: nothing could be tested.
set -euo pipefail

if [ "${1:-}" = --inside ]; then  # in the overlay
    deb=$2
    service=
    trap '[ -z "$service" ] || kill "$service"' EXIT  # what is left of a test that failed
    fail() { echo "FAILED: $*" >&2; exit 1; }
    list() { find /usr /etc /var/lib /run /lib/systemd -xdev \( -name '*vrdma*' -o -path '*vrdma*' \) ! -path '/var/lib/dpkg/info/*' 2>/dev/null | sort; }
    before=$(list)
    system_library=$(readlink -f /usr/lib/*-linux-gnu*/libibverbs.so.1)
    dpkg -i "$deb" >/dev/null || fail "dpkg -i"
    case $(dpkg-query -W -f '${Status}' vrdma) in "install ok installed") ;; *) fail "not installed" ;; esac

    [ "$(readlink -f /usr/lib/*-linux-gnu*/libibverbs.so.1)" = "$system_library" ] || fail "the system's libibverbs was replaced"
    ! ldconfig -p | grep '/vrdma/' || fail "the loader finds the library by itself"
    [ ! -e /etc/systemd/system/multi-user.target.wants/vrdmad.service ] || fail "the service was enabled"
    vrdmad --config /etc/vrdma/vrdmad.json --check || fail "the packaged configuration"
    unit=$(find /usr/lib/systemd/system /lib/systemd/system -name vrdmad.service | head -1)
    ! command -v systemd-analyze >/dev/null || systemd-analyze verify "$unit" || fail "the unit"
    socket_unit=${unit%/*}/vrdmad.socket
    grep -q '^ListenSequentialPacket=/run/vrdma/vrdmad.sock$' "$socket_unit" || fail "the socket's path"
    ! command -v systemd-analyze >/dev/null || systemd-analyze verify "$socket_unit" || fail "the socket's unit"
    # What time does not heal is not tried again and again.
    code=0
    vrdmad --log-level loud 2>/dev/null || code=$?
    [ "$code" = 2 ] || fail "exit code $code for a wrong configuration"
    for file in vrdmad.service vrdma-guestd.service; do
        [ "$file" != vrdmad.service ] || { grep -q '^RestartSec=2$' "$unit" && grep -q '^StartLimitIntervalSec=0$' "$unit"; } || fail "$file gives up while its address is not there yet"
        grep -q '^RestartPreventExitStatus=2$' "${unit%/*}/$file" || fail "$file starts again after a wrong configuration"
    done
    drop_in=/etc/systemd/system/vrdmad.service.d/hosts.conf
    install -D -m 644 /usr/share/doc/vrdma/vrdmad-hosts.conf $drop_in
    ! command -v systemd-analyze >/dev/null || systemd-analyze verify "$unit" || fail "the unit with a network"
    rm -r ${drop_in%/*}
    grep -q '^ExecStart=/usr/bin/vrdmad --config /etc/vrdma/vrdmad.json$' "$unit" || fail "the unit's paths"
    [ ! -e /usr/share/vrdma/bench/bench_test.py ] || fail "a test among what is installed"
    for page in vrdma.1 vrdma-container.1 vrdma-run.1 vrdma-show.1 vrdma-direct.1 vrdma-doctor.1 vrdma-bench.1 vrdma-vm.1 vrdma-host.1 vrdma-guestd.8 vrdmad.8 vrdmad.conf.5; do
        ls /usr/share/man/man?/$page* >/dev/null || fail "no manual page $page"
    done
    # What Debian asks of every package, and what README.md points at.
    [ "$(zcat /usr/share/doc/vrdma/changelog.gz | sed -n '1s/^vrdma (\(.*\)) .*/\1/p')" = "$(dpkg-query -W -f '${Version}' vrdma)" ] || fail "the changelog's version"
    grep -q '^License: BSD-2-Clause$' /usr/share/doc/vrdma/copyright || fail "the copyright file"
    for file in $(grep -o '\bdocs/[A-Za-z_]*\.md' /usr/share/doc/vrdma/README.md | sort -u); do
        [ -e "/usr/share/doc/vrdma/$file" ] || fail "README.md names $file"
    done
    diff /etc/cdi/vrdma.json <(vrdma container --format cdi) || fail "the package's device for containers is not what vrdma container says"
    bash -c 'source /usr/share/bash-completion/completions/vrdma && complete -p vrdma' >/dev/null || fail "completion"

    XDG_RUNTIME_DIR=$(mktemp -d)
    export XDG_RUNTIME_DIR
    vrdma run -- ibv_devinfo | grep 'hca_id:.*vrdma0' >/dev/null || fail "vrdma run -- ibv_devinfo"
    LD_LIBRARY_PATH=$(dirname "$(find /usr/lib -name libvrdma.so)") VRDMA_SOCKET=$XDG_RUNTIME_DIR/vrdma/vrdmad.sock \
        ibv_devinfo | grep 'hca_id:.*vrdma0' >/dev/null || fail "ibv_devinfo with LD_LIBRARY_PATH"
    vrdma doctor >/dev/null || fail "vrdma doctor"
    vrdma bench --only '^all-to-all/2$' --no-peers --seconds 0.02 --repetitions 1 --output "$XDG_RUNTIME_DIR/made" >"$XDG_RUNTIME_DIR/said" 2>&1 ||
        fail "vrdma bench: $(cat "$XDG_RUNTIME_DIR/said")"
    service=$(vrdma show --json | python3 -c 'import json, sys; print(json.load(sys.stdin)["service"]["pid"])')
    kill "$service"
    tail --pid="$service" -f /dev/null
    service=
    rm -rf "$XDG_RUNTIME_DIR"

    # As the unit runs it: a user of its own with the unit's capabilities and no more reaches another user's memory.
    capabilities=-all$(sed -n 's/^CapabilityBoundingSet=//p' "$unit" | tr '[:upper:]' '[:lower:]' | sed 's/\(^\| \)cap_/,+/g')
    [ "$capabilities" = -all,+sys_ptrace,+dac_override,+chown ] || fail "the unit's capabilities: $capabilities"
    folder=$(mktemp -d)
    chmod 777 "$folder"
    mkfifo "$folder/ready"
    setpriv --reuid 4242 --regid 4242 --clear-groups --inh-caps "$capabilities" --ambient-caps "$capabilities" \
        --bounding-set "$capabilities" --no-new-privs \
        vrdmad --socket "$folder/s.sock" --ready-fd 3 --log-level warn 3> "$folder/ready" &
    service=$!
    [ "$(head -c1 "$folder/ready" | od -An -tx1 | tr -d ' ')" = 01 ] || fail "vrdmad as in its unit"
    VRDMA_SOCKET=$folder/s.sock vrdma doctor > "$folder/report" || fail "vrdma doctor: $(cat "$folder/report")"
    grep -q '^ok *self-test' "$folder/report" || fail "the self-test with a service of another user: $(cat "$folder/report")"
    kill "$service"
    wait "$service" || fail "vrdmad's end"
    service=
    rm -rf "$folder"

    dpkg -r vrdma >/dev/null || fail "dpkg -r"
    [ -e /etc/vrdma/vrdmad.json ] || fail "removing took the configuration"
    [ ! -e /usr/bin/vrdma ] || fail "removing left the program"
    dpkg -P vrdma >/dev/null || fail "dpkg -P"
    after=$(list)
    [ "$before" = "$after" ] || fail "left behind: $(diff <(echo "$before") <(echo "$after"))"
    echo "installed, used, removed and purged; nothing is left"
    exit 0
fi

build=$(readlink -f "$1")
self=$(readlink -f "$0")
skip() { echo "SKIPPED: $*"; exit 77; }
for program in cpack dpkg-deb dpkg-shlibdeps; do  # `command -v` of several succeeds if there is one
    command -v "$program" >/dev/null || skip "$program is missing (apt-get install dpkg-dev cmake)"
done
command -v ibv_devinfo >/dev/null || skip "ibv_devinfo is missing (apt-get install ibverbs-utils)"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
(cd "$build" && cpack -G DEB -B "$scratch/pack" > "$scratch/cpack.log" 2>&1) || { cat "$scratch/cpack.log"; exit 1; }
deb=$(ls "$scratch"/pack/*.deb)
echo "$(basename "$deb"): $(dpkg-deb -f "$deb" Depends)"
dpkg-deb -c "$deb" | awk '{print $6, $7, $8}'
[ -n "$(dpkg-deb -f "$deb" Depends)" ] || { echo "FAILED: no dependencies were found"; exit 1; }

if [ "$(id -u)" = 0 ] && unshare -m true 2>/dev/null; then
    mkdir "$scratch/over" "$scratch/root"
    cat > "$scratch/enter" <<SCRIPT
set -e
mount -t tmpfs tmpfs "$scratch/over"
mkdir "$scratch/over/upper" "$scratch/over/work"
mount -t overlay overlay -o lowerdir=/,upperdir="$scratch/over/upper",workdir="$scratch/over/work" "$scratch/root" || exit 77
for folder in dev proc sys; do mount --rbind /\$folder "$scratch/root/\$folder"; done
mount -t tmpfs tmpfs "$scratch/root/tmp" && mount -t tmpfs tmpfs "$scratch/root/run"
cp "$deb" "$scratch/root/tmp/vrdma.deb"
cp "$self" "$scratch/root/tmp/deb_test.sh"
exec chroot "$scratch/root" /bin/bash /tmp/deb_test.sh --inside /tmp/vrdma.deb
SCRIPT
    code=0
    unshare -m bash "$scratch/enter" || code=$?
    [ $code = 77 ] || exit $code
fi

echo "not root, or no overlayfs: installing, removing and purging are not tested"
mkdir "$scratch/unpacked"
dpkg-deb -x "$deb" "$scratch/unpacked"
export XDG_RUNTIME_DIR=$scratch/run
mkdir "$XDG_RUNTIME_DIR"
"$scratch/unpacked/usr/bin/vrdma" run -- ibv_devinfo | grep 'hca_id:.*vrdma0'
kill "$("$scratch/unpacked/usr/bin/vrdma" show --json | python3 -c 'import json, sys; print(json.load(sys.stdin)["service"]["pid"])')"
