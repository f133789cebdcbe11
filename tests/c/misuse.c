// Breaks the contract on purpose: AddressSanitizer must see it, in C and in Rust. Argument: where.
#include "check.h"

int main(int argc, char **argv) {
  CHECK(argc > 1);
  hob_error *error = NULL;
  CHECK(hob_abi_check(0, &error) == HOB_UNSUPPORTED);
  if (strcmp(argv[1], "c") == 0) {
    char *volatile text = (char *)malloc(4);
    text[argc + 2] = 0;  // the fifth of four
    free(text);
  }
  hob_error_free(error);
  if (strcmp(argv[1], "rust") == 0) printf("%d\n", hob_error_status(error));  // read by Rust after its end
  if (strcmp(argv[1], "twice") == 0) hob_error_free(error);
  return 0;
}
