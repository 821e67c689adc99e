"""What vrdmad makes of its configuration and flags: what it takes, and how it refuses the rest."""
import json
import pathlib
import unittest

from support import TestCase, as_nobody, needs_full_device, needs_root, readable_copy


class Configuration(TestCase):
    def check(self, text):
        file = self.folder / "vrdmad.json"
        file.write_text(text)
        return self.vrdmad("--config", file, "--check"), str(file)

    def test_a_missing_file_is_named(self):
        self.assert_refuses(self.vrdmad("--config", "/nowhere/vrdmad.json", "--check"), 2, "/nowhere/vrdmad.json", "No such file", "check the path")

    @needs_root
    def test_an_unreadable_file_is_named(self):
        file = self.folder / "secret.json"
        file.write_text("{}")
        file.chmod(0o600)
        program = readable_copy(self.folder) / "vrdmad"
        self.assert_refuses(self.run_program(*as_nobody(program, "--config", file, "--check")), 2, str(file), "Permission denied", "permissions")

    def test_a_folder_in_place_of_the_file_is_refused(self):
        self.assert_refuses(self.vrdmad("--config", self.folder, "--check"), 2, str(self.folder), "is a folder")

    def test_a_value_that_makes_no_sense_is_refused_with_the_files_name(self):
        result, file = self.check('{"shards": 0}')
        self.assert_refuses(result, 2, file, '"shards" is 0')

    def test_a_link_layer_has_two_names(self):
        for name in ("ib", "infiniband"):
            self.assertEqual(self.check(json.dumps({"link_layer": name}))[0].returncode, 0)

    def test_broken_json_says_where(self):
        result, file = self.check('{"shards": 1,')
        self.assert_refuses(result, 2, file, "not valid JSON", "line 1")

    def test_an_unknown_key_is_named_with_the_known_ones(self):
        result, file = self.check('{"sokcet": "/tmp/x"}')
        self.assert_refuses(result, 2, file, 'unknown key "sokcet"', "known are", "socket_mode")
        result, file = self.check('{"quota": {"guest": 1}}')
        self.assert_refuses(result, 2, file, 'unknown key "guest" in "quota"', "registered_bytes")

    def test_places_that_are_none_are_seen_by_check_and_at_the_start(self):
        file = self.folder / "a file"
        file.write_text("")
        for flags, *words in ((("--socket", self.folder / ("x" * 120)), "File name too long", "107"), (("--socket", self.folder), str(self.folder), "is a folder"),
                              (("--socket", file), str(file), "not a socket"), (("--socket", self.socket, "--log-file", self.folder), str(self.folder), "--log-file")):
            for check in (), ("--check",):
                with self.subTest(flags, check=check):
                    self.assert_refuses(self.vrdmad(*flags, *check), 2, *words)
        # What only the start would find, this says, too: nothing can be made there.
        for flags, *words in ((("--socket", self.socket, "--log-file", "/proc/x"), "/proc/x", "--log-file"), (("--socket", self.socket, "--log-file", file / "log"), "Not a directory", "--log-file"),
                              (("--socket", "/proc/x/s"), "/proc/x/s", "--socket"), (("--socket", "/dev/null/s"), "Not a directory", "--socket")):
            with self.subTest(flags):
                self.assert_refuses(self.vrdmad(*flags, "--check"), 2, *words)
        self.assertEqual(self.vrdmad("--check", "--socket", self.folder / "new/s", "--log-file", self.folder / "new/log").returncode, 0)
        self.assertFalse((self.folder / "new").exists())
        result, _ = self.check(json.dumps({"socket": str(self.folder / "a\0b")}))
        self.assert_refuses(result, 2, '"socket" is ', "without NUL")

    def test_an_hca_that_makes_no_sense(self):
        for text, *words in (('{"hca": 1}', '"hca"'), ('{"hca": {"ports": 1}}', "ports"), ('{"hca": {"port": 300}}', '"port" of "hca" is 300', "from 1 to 254"),
                             ('{"hca": {"mtu": 1500}}', '"mtu" of "hca" is 1500', "256, 512, 1024, 2048 or 4096"), ('{"hca": {"mtu": 0}}', '"mtu" of "hca" is 0'),
                             ('{"hca": {"ack_timeout": 32}}', '"ack_timeout" of "hca" is 32', "from 0 to 31"), ('{"hca": {"device": 1}}', "device")):
            with self.subTest(text):
                result, file = self.check(text)
                self.assertEqual(result.returncode, 2)
                for word in (*words, str(file)):
                    self.assertIn(word, result.stderr)
        for text in ('{"hca": {}}', '{"hca": true}', '{"hca": false}', '{"hca": {"device": "rxe0", "port": 1, "gid_index": 0, "mtu": 1024, "ack_timeout": 18}}'):
            with self.subTest(text):
                self.assertEqual(self.check(text)[0].returncode, 0)

    def test_partitions_and_an_etcd_that_make_no_sense(self):
        for text, *words in (('{"partitions": ["0x8001"]}', '"partitions" must be a JSON object'),
                             ('{"partitions": {"0x8000": ["1"]}}', '"0x8000" in "partitions" is no P_Key', '"0x8001"'),
                             ('{"partitions": {"0x8001": "1"}}', '"0x8001" in "partitions" must be a list'),
                             ('{"partitions": {"0x8001": ["me"]}}', '"me" in "0x8001" of "partitions" is no member', '"b/1000"'),
                             ('{"partitions": {"0x8001": ["b/1"]}}', 'there is no host "b"'),
                             ('{"partitions": {"0x8001": ["1"]}, "hosts": {"address": "127.0.0.1"}}', 'vrdma host partition'),
                             ('{"hosts": {"address": "127.0.0.1", "seed": "127.0.0.2", "etcd": {"endpoints": ["http://127.0.0.1:1"]}}}', '"etcd" and "peers" or "seed"'),
                             ('{"hosts": {"address": "127.0.0.1", "refresh_ms": 1}}', '"refresh_ms" is 1', "at least 10"),
                             ('{"hosts": {"address": "127.0.0.1", "etcd": {}}}', 'no "endpoints"'),
                             ('{"hosts": {"address": "127.0.0.1", "etcd": {"endpoints": ["10.0.0.1"]}}}', '"10.0.0.1" in "endpoints"', "http://HOST:PORT"),
                             ('{"hosts": {"address": "127.0.0.1", "etcd": {"endpoints": ["http://127.0.0.1:1"], "key_file": "k"}}}', '"certificate_file" and "key_file"')):
            result, file = self.check(text)
            self.assert_refuses(result, 2, *words)
        result, _ = self.check('{"partitions": {"0x8001": ["0", "*/1", 1000], "0xffff": ["*"]}}')
        self.assertEqual(result.returncode, 0, result.stderr)

    def test_hosts_that_cannot_meet(self):
        secret = self.folder / "secret"
        secret.write_bytes(b"s" * 32)
        secret.chmod(0o600)

        def remote(second=None, **own):
            hosts = [{"name": "a", "address": "10.0.0.1", "lids": "1-99"}, {"name": "b", "address": "10.0.0.2", "lids": "100-200", **(second or {})}]
            return self.check(json.dumps({"remote": {"name": "a", "address": "10.0.0.1", "secret_file": str(secret), "hosts": hosts, **own}}))[0]
        result = remote()
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assert_refuses(remote({"address": "10.0.0.1"}), 2, "hosts a and b are both at 10.0.0.1:28251")
        self.assert_refuses(remote({"address": "fd00::2"}), 2, "10.0.0.1 (IPv4)", "host b fd00::2 (IPv6)")
        self.assert_refuses(remote(address="10.0.0.3"), 2, "10.0.0.3:28251", "10.0.0.1:28251")
        for address, word in (("224.0.0.1", "many hosts"), ("ff05::1", "many hosts"), ("fe80::1%eth0", "link-local"), ("fe80::1", "link-local"), ("0.0.0.0", "names no host")):
            self.assert_refuses(remote(address=address), 2, address, word)
            self.assert_refuses(self.check(json.dumps({"hosts": {"address": address}}))[0], 2, address, word)
        for more in ({"seed": "fd00::2"}, {"peers": [{"name": "b", "address": "fd00::2"}]}):
            self.assert_refuses(self.check(json.dumps({"hosts": {"address": "10.0.0.1", **more}}))[0], 2, "10.0.0.1 (IPv4)", "fd00::2 (IPv6)")
        # What the start says of files, this says, too.
        secret.chmod(0o644)
        self.assert_refuses(remote(), 2, str(secret), "others may read it", "chmod 0600")
        secret.chmod(0o600)
        secret.write_text("short")
        self.assert_refuses(remote(), 2, str(secret), "fewer than 32 bytes")
        secret.unlink()
        self.assert_refuses(remote(), 2, str(secret), "No such file")
        self.assert_refuses(self.check(json.dumps({"hosts": {"address": "10.0.0.1", "folder": str(self.folder / "none")}}))[0], 2, str(self.folder / "none"), "vrdma host init")

    def test_a_key_given_twice_and_what_lies_behind_a_nul_are_refused(self):
        result, file = self.check('{"lid_first": 1, "quota": {"guests": 1, "objects": 2, "guests": 3}}')
        self.assert_refuses(result, 2, file, '"guests" is given twice')
        result, file = self.check('{"lid_first": 1, /* one of many */ "lid_first": 2}')
        self.assert_refuses(result, 2, file, '"lid_first" is given twice')
        result, file = self.check('{}\0{"lid_first": 0}')
        self.assert_refuses(result, 2, file, "NUL")

    def test_a_wrong_type_is_named_with_its_value(self):
        for text, *words in (('{"shards": "two"}', '"shards" is "two"', "whole number from 1 to 32"),
                             ('{"shards": -1}', '"shards" is -1', "whole number"),
                             ('{"shards": 1.5}', '"shards" is 1.5', "whole number"),
                             ('{"socket": 7}', '"socket" is 7', "string"),
                             ('{"active_mtu": 99999999999999}', '"active_mtu" is 99999999999999', "whole number from 256 to 4096"),
                             ('{"quota": []}', '"quota" must be a JSON object', "array"),
                             ('{"socket_mode": 666}', '"socket_mode" is 666', '"0660"'),
                             ('{"socket_mode": "0888"}', '"socket_mode" is "0888"', '"0660"'),
                             ('[]', "must be a JSON object", "array")):
            with self.subTest(text):
                result, file = self.check(text)
                self.assert_refuses(result, 2, file, *words)

    def test_which_of_several_keys_of_one_name_is_meant_and_its_range(self):
        for text, *words in (('{"hca": {"port": -1}}', '"port" of "hca" is -1', "from 1 to 254"), ('{"hca": {"ack_timeout": -1}}', "from 0 to 31"), ('{"hca": {"mtu": -1}}', "from 256 to 4096"),
                             ('{"remote": {"port": -1}}', '"port" of "remote" is -1', "from 1 to 65535"),
                             ('{"remote": {"hosts": [{"port": -1}]}}', '"port" of a host of "remote" is -1'), ('{"hosts": {"port": -1}}', '"port" of "hosts" is -1', "from 1 to"),
                             ('{"hosts": {"lids": "x"}}', '"lids" of "hosts" is "x"', "from 1 to 49150"), ('{"hosts": {"peers": [{"port": -1}]}}', '"port" of "peers" is -1'),
                             ('{"hosts": {"etcd": {"prefix": 1}}}', '"prefix" of "etcd" is 1'), ('{"quota": {"guests": "x"}}', '"guests" of "quota" is "x"')):
            with self.subTest(text):
                self.assert_refuses(self.check(text)[0], 2, *words)
        for lids in (" 1-5", "+1-5", "1- 5", "1-5 ", "-5", "1-", "5-1", "0-5", "1-49151", "", "0x1-5", "1-5-7"):
            with self.subTest(lids):
                self.assert_refuses(self.check(json.dumps({"remote": {"hosts": [{"lids": lids}]}}))[0], 2, '"lids" is', '"1-4095"')

    def test_a_value_out_of_range_says_what_is_allowed(self):
        for text, *words in (('{"link_layer": "token ring"}', '"token ring"', "infiniband", "ethernet"),
                             ('{"active_mtu": 1500}', "1500", "256, 512, 1024, 2048 or 4096"),
                             ('{"direct": "always"}', '"always"', '"mediated" or "auto"'),
                             ('{"shards": 0}', '"shards" is 0', "1 to 32"), ('{"shards": 33}', '"shards" is 33', "1 to 32"),
                             ('{"arena_bytes": 4097}', "4097", "multiple of 4096"),
                             ('{"lid_first": 0}', '"lid_first" 0', "1 to 49150"),
                             ('{"lid_first": 4294967295, "lid_count": 1}', "4294967295", "1 to 49150"),
                             ('{"lid_first": 49151, "lid_count": 1}', "49151"),
                             ('{"log_level": "loud"}', '"loud"', "trace, debug, info")):
            with self.subTest(text):
                result, _ = self.check(text)
                self.assert_refuses(result, 2, *words)

    def test_comments_and_every_known_key_are_accepted(self):
        result, _ = self.check("""{
            // a comment
            "socket": "/run/vrdma/vrdmad.sock", "socket_mode": "0660", "link_layer": "ethernet", "shards": 1, "log_file": "",
            "log_level": "warn", "arena_bytes": 1073741824, "lid_first": 16, "lid_count": 32, "active_mtu": 1024, "idle_exit_s": 0,
            "direct": "auto", "quota": {"guests": 4, "objects": 100, "registered_bytes": 1048576, "queue_bytes": 1048576}}""")
        self.assertEqual((result.returncode, result.stdout), (0, "the configuration is good\n"), result.stderr)

    def test_the_packaged_configuration_is_good(self):
        packaged = pathlib.Path(__file__).parents[2] / "packaging" / "vrdmad.json"
        result = self.vrdmad("--config", packaged, "--check")
        self.assertEqual(result.returncode, 0, result.stderr)

    def test_a_file_without_an_end_is_refused(self):
        self.assert_refuses(self.vrdmad("--config", "/dev/zero", "--check"), 2, "/dev/zero", "longer than 1 MiB")

    def test_a_descriptor_that_cannot_be_written_is_refused_not_passed_over(self):
        with open("/dev/null") as read_only:
            for descriptor in 99, read_only.fileno():
                result = self.vrdmad("--socket", self.socket, "--ready-fd", descriptor, pass_fds=[read_only.fileno()])
                self.assert_refuses(result, 2, f"--ready-fd is {descriptor}")

    def test_a_flag_that_is_no_number_says_what_is_one(self):
        for flag, value, *words in (("--shards", "x", "from 1 to 32"), ("--shards", "0", "from 1 to 32"), ("--idle-exit", "-1", "from 0 to 4294967295"), ("--ready-fd", "x", "from 0 to"),
                                    ("--shards", "", '""')):
            with self.subTest(flag, value=value):
                self.assert_refuses(self.vrdmad("--check", f"{flag}={value}" if value else flag, *([] if value else [""])), 2, flag, f'"{value}" is no whole number', *words)

    @needs_full_device
    def test_what_cannot_be_printed_is_told(self):
        for words in (("--check", "--socket", self.socket), ("--help",), ("--version",)):
            with self.subTest(words), open("/dev/full", "w") as full:
                self.assert_refuses(self.vrdmad(*words, stdout=full), 1, "cannot write to standard output", "No space left")

    def test_an_unknown_flag_is_a_usage_error(self):
        self.assert_refuses(self.vrdmad("--sokcet", "/tmp/x"), 2, "vrdmad:", "--sokcet", "--help")

    def test_an_empty_flag_is_refused_not_replaced_by_the_default(self):
        for flag, *words in (("--socket", '"socket" is empty'), ("--link-layer", '"link_layer" is ""'), ("--log-level", '"log_level" is ""'), ("--direct", '"direct" is ""'),
                             ("--config", "check the path")):
            with self.subTest(flag):
                self.assert_refuses(self.vrdmad("--check", flag, ""), 2, *words)


if __name__ == "__main__":
    unittest.main()
