//! The program `zae-limiter`.

use zae_limiter_cli::World;

fn main() -> std::process::ExitCode {
    zae_limiter_cli::main(World::of_this_process())
}
