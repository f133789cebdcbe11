// Breaks the contract on purpose: ThreadSanitizer must see it, in C and in Rust. Argument: where.
#define _POSIX_C_SOURCE 200809L
#include "check.h"

#include <pthread.h>

static int number;
static hob_error *failure;

static void *write_number(void *unused) {
  number++;
  return unused;
}

static void *free_the_error(void *unused) {
  hob_error_free(failure);
  return unused;
}

int main(int argc, char **argv) {
  CHECK(argc > 1);
  CHECK(hob_abi_check(0, &failure) == HOB_UNSUPPORTED);
  int in_c = strcmp(argv[1], "c") == 0;
  pthread_t thread;
  CHECK(pthread_create(&thread, NULL, in_c ? write_number : free_the_error, NULL) == 0);
  // What the other thread writes and gives back is touched without waiting for it.
  if (in_c)
    number++;
  else
    printf("%d\n", hob_error_status(failure));
  CHECK(pthread_join(thread, NULL) == 0);
  if (in_c) hob_error_free(failure);
  return 0;
}
