//! The program `zae-limiter`.

use zae_limiter_aggregator::lambda;
use zae_limiter_cli::World;

fn main() -> std::process::ExitCode {
    // Started by AWS Lambda it is the aggregator, and nothing of the command line is touched.
    if lambda::is_called_by_lambda() {
        return lambda::main();
    }
    zae_limiter_cli::main(World::of_this_process())
}
