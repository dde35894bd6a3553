//! The program `zae-limiter`.

use zae_limiter_cli::World;

fn main() -> std::process::ExitCode {
    // AWS Lambda starts this program as the aggregator, without the command line.
    #[cfg(feature = "aws")]
    if zae_limiter_aggregator::lambda::is_called_by_lambda() {
        // `deploy` and `ensure_stack` look for this mark in an executable. Unused, it would not be linked.
        std::hint::black_box(zae_limiter_infra::RELEASE_MARK);
        return zae_limiter_aggregator::lambda::main();
    }
    zae_limiter_cli::main(World::of_this_process())
}
