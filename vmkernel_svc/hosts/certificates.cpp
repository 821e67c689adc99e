#include "vmkernel_svc/hosts/certificates.hpp"

#include <fmt/format.h>
#include <openssl/bio.h>
#include <openssl/ec.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/rand.h>
#include <openssl/x509v3.h>

#include <array>
#include <cstring>
#include <ctime>
#include <stdexcept>

#include "vrdma/printable.hpp"

namespace vrdma::hosts {

namespace {

[[noreturn]] void fail(const std::string& what) {
  char reason[256] = "no reason given";
  if (const unsigned long code = ERR_get_error()) ERR_error_string_n(code, reason, sizeof(reason));
  ERR_clear_error();
  throw std::runtime_error(fmt::format("{} ({})", what, reason));
}
template <class T>
T must(T value, const char* what) {
  if (!value) fail(what);
  return value;
}

struct FreeBio { void operator()(BIO* p) const { BIO_free(p); } };
using BioPtr = std::unique_ptr<BIO, FreeBio>;

constexpr const char* organisation = "vrdma subnet";
constexpr const char* admin_unit = "administrator";

std::string hex(const unsigned char* bytes, std::size_t count) {
  std::string text;
  for (std::size_t i = 0; i < count; ++i) text += fmt::format("{:02x}", bytes[i]);
  return text;
}

std::string entry(const X509_NAME* name, int nid) {
  char text[128] = "";
  X509_NAME_get_text_by_NID(name, nid, text, sizeof(text));
  return printable(text);  // of anybody's certificate: it is part of what is said about those who are refused
}

void add_entry(X509_NAME* name, const char* field, const std::string& value) {
  must(X509_NAME_add_entry_by_txt(name, field, MBSTRING_UTF8, reinterpret_cast<const unsigned char*>(value.c_str()), -1, -1, 0), "cannot name a certificate");
}

void add_extension(X509* certificate, X509* issuer, int nid, const char* value) {
  X509V3_CTX context;
  X509V3_set_ctx_nodb(&context);
  X509V3_set_ctx(&context, issuer, certificate, nullptr, nullptr, 0);
  X509_EXTENSION* const extension = must(X509V3_EXT_conf_nid(nullptr, &context, nid, value), "cannot make a certificate's extension");
  const int added = X509_add_ext(certificate, extension, -1);
  X509_EXTENSION_free(extension);
  must(added, "cannot extend a certificate");
}

void set_time(ASN1_TIME* to, std::int64_t seconds) {
  if (ASN1_TIME_set(to, static_cast<std::time_t>(seconds)) == nullptr) fail("cannot set a certificate's time");
}

std::int64_t seconds_of(const ASN1_TIME* time) {
  std::tm parts{};
  if (ASN1_TIME_to_tm(time, &parts) != 1) return 0;
  return ::timegm(&parts);
}

std::string formatted(std::int64_t seconds, const char* format) {
  const auto time = static_cast<std::time_t>(seconds);
  std::tm parts{};
  ::gmtime_r(&time, &parts);
  char text[32];
  std::strftime(text, sizeof(text), format, &parts);
  return text;
}

std::string minute_of(std::int64_t seconds) { return formatted(seconds, "%Y-%m-%d %H:%M UTC"); }

Identity begin(const std::string& common_name, Role role, std::int64_t from_s, std::int64_t until_s) {
  Identity made;
  made.key.reset(must(EVP_EC_gen("P-256"), "cannot make a key"));
  made.certificate.reset(must(X509_new(), "cannot make a certificate"));
  X509* const certificate = made.certificate.get();
  X509_set_version(certificate, X509_VERSION_3);
  std::array<unsigned char, 16> serial;
  must(RAND_bytes(serial.data(), static_cast<int>(serial.size())) == 1, "no random bytes");
  serial[0] = static_cast<unsigned char>((serial[0] & 0x7f) | 0x40);  // positive, and always as long
  BIGNUM* const number = must(BN_bin2bn(serial.data(), static_cast<int>(serial.size()), nullptr), "cannot number a certificate");
  const bool numbered = BN_to_ASN1_INTEGER(number, X509_get_serialNumber(certificate)) != nullptr;
  BN_free(number);
  must(numbered, "cannot number a certificate");
  set_time(X509_getm_notBefore(certificate), from_s);
  set_time(X509_getm_notAfter(certificate), until_s);
  X509_NAME* const name = X509_get_subject_name(certificate);
  add_entry(name, "O", organisation);
  if (role == Role::admin) add_entry(name, "OU", admin_unit);
  add_entry(name, "CN", common_name);
  must(X509_set_pubkey(certificate, made.key.get()), "cannot put a key into a certificate");
  return made;
}

std::string of_bio(BIO* bio) {
  char* data = nullptr;
  const long bytes = BIO_get_mem_data(bio, &data);
  return {data, static_cast<std::size_t>(bytes)};
}

}  // namespace

std::string host_name_error(const std::string& name) {
  const bool good = !name.empty() && name.size() <= 63 && name.front() != '-' && name.back() != '-' &&
                    name.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789-") == std::string::npos;
  return good ? "" : "a host's name is 1 to 63 of a-z, 0-9 and -, and neither begins nor ends with -";
}

Identity make_authority(int days) {
  std::array<unsigned char, 4> tail;
  must(RAND_bytes(tail.data(), static_cast<int>(tail.size())) == 1, "no random bytes");
  const std::int64_t now = std::time(nullptr);
  Identity made = begin("vrdma-" + hex(tail.data(), tail.size()), Role::authority, now - 86400, now + std::int64_t{days} * 86400);
  X509* const certificate = made.certificate.get();
  X509_set_issuer_name(certificate, X509_get_subject_name(certificate));
  add_extension(certificate, certificate, NID_basic_constraints, "critical,CA:TRUE,pathlen:0");
  add_extension(certificate, certificate, NID_key_usage, "critical,keyCertSign,cRLSign");
  add_extension(certificate, certificate, NID_subject_key_identifier, "hash");
  must(X509_sign(certificate, made.key.get(), EVP_sha256()), "cannot sign");
  return made;
}

Identity issue(const Identity& authority, const std::string& name, Role role, std::int64_t from_s, std::int64_t until_s) {
  if (const auto wrong = host_name_error(name); !wrong.empty()) throw std::runtime_error(fmt::format("\"{}\": {}", name, wrong));
  Identity made = begin(name, role, from_s, until_s);
  X509 *const certificate = made.certificate.get(), *const issuer = authority.certificate.get();
  X509_set_issuer_name(certificate, X509_get_subject_name(issuer));
  add_extension(certificate, issuer, NID_basic_constraints, "critical,CA:FALSE");
  add_extension(certificate, issuer, NID_key_usage, "critical,digitalSignature");
  add_extension(certificate, issuer, NID_ext_key_usage, role == Role::host ? "serverAuth,clientAuth" : "clientAuth");
  add_extension(certificate, issuer, NID_subject_alt_name, ("DNS:" + name).c_str());
  must(X509_sign(certificate, authority.key.get(), EVP_sha256()), "cannot sign");
  return made;
}

CertificateInfo describe(X509* certificate) {
  CertificateInfo info;
  const X509_NAME* const subject = X509_get_subject_name(certificate);
  info.name = entry(subject, NID_commonName);
  info.role = X509_check_ca(certificate) == 1 ? Role::authority : entry(subject, NID_organizationalUnitName) == admin_unit ? Role::admin : Role::host;
  info.issuer = entry(X509_get_issuer_name(certificate), NID_commonName);
  BIGNUM* const number = ASN1_INTEGER_to_BN(X509_get0_serialNumber(certificate), nullptr);
  if (char* const digits = number != nullptr ? BN_bn2hex(number) : nullptr) {
    for (const char* at = digits; *at != '\0'; ++at) info.serial += static_cast<char>(*at >= 'A' && *at <= 'F' ? *at - 'A' + 'a' : *at);
    OPENSSL_free(digits);
  }
  BN_free(number);
  unsigned char digest[EVP_MAX_MD_SIZE];
  unsigned int bytes = 0;
  if (X509_digest(certificate, EVP_sha256(), digest, &bytes) == 1) info.fingerprint = hex(digest, bytes);
  info.not_before_s = seconds_of(X509_get0_notBefore(certificate));
  info.not_after_s = seconds_of(X509_get0_notAfter(certificate));
  return info;
}

std::string day_of(std::int64_t seconds) { return formatted(seconds, "%Y-%m-%d"); }

std::string refusal(X509* certificate, X509* authority, std::int64_t now_s) {
  const auto info = describe(certificate);
  EVP_PKEY* const key = X509_get0_pubkey(authority);
  if (key == nullptr || X509_verify(certificate, key) != 1) {
    ERR_clear_error();
    return fmt::format("the certificate of \"{}\" is of another authority (\"{}\"; this subnet's is \"{}\"): have it signed by \"vrdma host add\" of this subnet",
                       info.name, info.issuer, describe(authority).name);
  }
  if (now_s < info.not_before_s)
    return fmt::format("the certificate of \"{}\" is not valid before {}: set the clocks of both hosts", info.name, minute_of(info.not_before_s));
  if (now_s > info.not_after_s)
    return fmt::format("the certificate of \"{}\" has expired on {}: make another by \"vrdma host add\", or set the clocks of both hosts", info.name, minute_of(info.not_after_s));
  if (now_s > describe(authority).not_after_s)
    return fmt::format("the authority's own certificate has expired on {}: begin anew by \"vrdma host init\"", minute_of(describe(authority).not_after_s));
  return {};
}

std::string to_pem(X509* certificate) {
  const BioPtr bio(must(BIO_new(BIO_s_mem()), "no memory"));
  must(PEM_write_bio_X509(bio.get(), certificate), "cannot write a certificate");
  return of_bio(bio.get());
}

std::string to_pem(EVP_PKEY* key) {
  const BioPtr bio(must(BIO_new(BIO_s_mem()), "no memory"));
  must(PEM_write_bio_PKCS8PrivateKey(bio.get(), key, nullptr, nullptr, 0, nullptr, nullptr), "cannot write a key");
  return of_bio(bio.get());
}

X509Ptr certificate_from_pem(const std::string& pem, const std::string& origin) {
  const BioPtr bio(must(BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size())), "no memory"));
  X509Ptr certificate(PEM_read_bio_X509(bio.get(), nullptr, nullptr, nullptr));
  if (!certificate) fail(fmt::format("{}: there is no certificate in it", origin));
  return certificate;
}

KeyPtr key_from_pem(const std::string& pem, const std::string& origin) {
  const BioPtr bio(must(BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size())), "no memory"));
  // No callback would ask at a terminal; an empty password asks nobody.
  KeyPtr key(PEM_read_bio_PrivateKey(bio.get(), nullptr, nullptr, const_cast<char*>("")));
  if (!key) fail(fmt::format("{}: there is no private key in it", origin));
  return key;
}

std::string write_invitation(const Invitation& invitation) {
  return fmt::format("An invitation to a vrdma subnet: who has this file can join as host \"{}\".\n"
                     "Bring it there by a safe way (scp), run \"vrdma host join FILE\", and remove it.\n"
                     "Seed: {}\n{}{}{}",
                     describe(invitation.host.certificate.get()).name, invitation.seed, to_pem(invitation.host.certificate.get()),
                     to_pem(invitation.host.key.get()), to_pem(invitation.authority.get()));
}

Invitation read_invitation(const std::string& text, const std::string& origin) {
  Invitation invitation;
  const std::string key = "\nSeed: ";
  if (const auto at = text.find(key); at != std::string::npos) {
    const auto begin_at = at + key.size();
    invitation.seed = text.substr(begin_at, text.find('\n', begin_at) - begin_at);
  }
  invitation.host.certificate = certificate_from_pem(text, origin);
  invitation.host.key = key_from_pem(text, origin);
  const std::string mark = "-----END CERTIFICATE-----";
  const auto first = text.find(mark);
  invitation.authority = certificate_from_pem(text.substr(first + mark.size()), origin);
  return invitation;
}

}  // namespace vrdma::hosts
