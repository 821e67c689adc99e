// The certificates by which hosts of a subnet know each other: one authority, one key and certificate per host, all in a folder.
//
//   FOLDER/ca.pem          the authority's certificate: who is signed by it belongs to the subnet
//   FOLDER/host.pem, host.key   this host's
//   FOLDER/authority.key   where hosts are added, and nowhere else
//   FOLDER/issued/NAME.pem  what was signed there
//
// Functions throw std::runtime_error with a message for a person. Keys are written 0600, and refused where others may read them.
#pragma once

#include <openssl/evp.h>
#include <openssl/x509.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

namespace vrdma::hosts {

struct FreeX509 { void operator()(X509* p) const { X509_free(p); } };
struct FreeKey { void operator()(EVP_PKEY* p) const { EVP_PKEY_free(p); } };
using X509Ptr = std::unique_ptr<X509, FreeX509>;
using KeyPtr = std::unique_ptr<EVP_PKEY, FreeKey>;

// What a certificate may be used for.
enum class Role { authority, host, admin };

struct Identity {
  X509Ptr certificate;
  KeyPtr key;
};

struct CertificateInfo {
  std::string name;         // the host's
  Role role;
  std::string issuer;
  std::string serial;       // hexadecimal
  std::string fingerprint;  // SHA-256, hexadecimal
  std::int64_t not_before_s, not_after_s;
};

// Empty: good. Names are as in DNS: 1 to 63 of a-z, 0-9 and '-', neither first nor last of them '-'.
std::string host_name_error(const std::string& name);

Identity make_authority(int days);
// A key and certificate for `name`, good from `from_s` to `until_s` (seconds since 1970).
Identity issue(const Identity& authority, const std::string& name, Role role, std::int64_t from_s, std::int64_t until_s);
CertificateInfo describe(X509* certificate);
std::string day_of(std::int64_t seconds);  // "2026-01-31", of a time of these
// Why a certificate does not make its holder a member; empty: it does.
std::string refusal(X509* certificate, X509* authority, std::int64_t now_s);

std::string to_pem(X509* certificate);
std::string to_pem(EVP_PKEY* key);
X509Ptr certificate_from_pem(const std::string& pem, const std::string& origin);
KeyPtr key_from_pem(const std::string& pem, const std::string& origin);

// --- the folder

using Folder = std::filesystem::path;
X509Ptr load_certificate(const std::filesystem::path& file);
KeyPtr load_key(const std::filesystem::path& file);  // refuses one that others may read, and one of another user
Identity load_authority(const Folder& folder);
Identity load_host(const Folder& folder);            // checked: the key fits, the certificate is of this folder's authority and in time
enum class For { owner, everybody };  // who may read it
void save_new(const std::filesystem::path& file, const std::string& text, For whom);  // refuses to replace a file
std::string read_file(const std::filesystem::path& file);

// One file by which another host joins: certificates, key, and the address to ask first ("10.0.0.1:28250", may be empty).
struct Invitation {
  Identity host;
  X509Ptr authority;
  std::string seed;
};
std::string write_invitation(const Invitation& invitation);
Invitation read_invitation(const std::string& text, const std::string& origin);

}  // namespace vrdma::hosts
