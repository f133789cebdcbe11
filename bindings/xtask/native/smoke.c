// Linked and run at the end of `cargo xtask setup`: shows that mlx-c, MLX and its BLAS load together on this machine.
// The three declarations repeat mlx/c/string.h and version.h, whose neighbours only C++ can include on x86-64.
#include <stdio.h>
#include <string.h>

typedef struct {
  void *ctx;
} mlx_string;
mlx_string mlx_string_new(void);
int mlx_version(mlx_string *out);
const char *mlx_string_data(mlx_string text);

int main(int argc, char **argv) {
  mlx_string version = mlx_string_new();
  if (argc != 2 || mlx_version(&version) != 0) return 2;
  printf("%s\n", mlx_string_data(version));
  return strncmp(mlx_string_data(version), argv[1], strlen(argv[1])) == 0 ? 0 : 3;
}
