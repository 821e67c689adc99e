#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include <iostream>

int main(int argc, char** argv) {
  std::cout << std::unitbuf;  // what has failed is seen, too, where the program then ends by a signal
  return doctest::Context(argc, argv).run();
}
