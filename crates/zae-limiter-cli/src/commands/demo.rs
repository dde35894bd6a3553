//! `demo`: half a minute in the life of a gateway.

use std::time::Duration;

use tempfile::TempDir;
use zae_limiter::RateLimiter;

use crate::context::Context;
use crate::exit::ExitStatus;
use crate::failure::Failure;
use crate::fresh::Fresh;
use crate::line;
use crate::printer::Look;

mod cast;
mod play;
mod report;
mod tally;
mod traffic;
mod view;

#[cfg(test)]
mod tests;

use view::Show;

const AFTER_HELP: &str = "\
An organisation has two projects with three API keys each. Every call takes one request and an
estimate of its tokens from its key, its project and the organisation, all or nothing, and settles
for what it really used when it is done; some calls fail and give everything back. There is more
traffic than the limits allow.

At the end all that was admitted is held against the limits, in every interval of the run, and the
usage that the store recorded against what was settled.

Examples:
  zae-limiter demo
  zae-limiter demo --seconds 10 --seed 7
  zae-limiter demo --store memory: -o json
  zae-limiter demo --store sqlite:limits.db     in a namespace of its own, removed afterwards

Exit status: 0 the limits held, 1 they did not, 130 ended by Ctrl-C (with a summary).";

/// Arguments of `demo`.
#[derive(clap::Args, Debug)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct Args {
    /// How long it takes, 1 to 3600
    #[arg(
        long, value_name = "N", default_value_t = 30,
        value_parser = clap::value_parser!(u16).range(1..=3_600),
    )]
    seconds: u16,

    /// Another number plays other traffic
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
}

/// Where the demo plays.
enum Stage {
    /// A file of its own, in a folder that is removed with it.
    File { limiter: RateLimiter, folder: TempDir },
    /// A namespace of its own.
    Namespace(Fresh),
}

pub(crate) async fn run(args: Args, context: &mut Context) -> Result<ExitStatus, Failure> {
    let (stage, store) = match context.chosen_store_url()? {
        Some(url) => {
            (Stage::Namespace(Fresh::open(context, "demo", |builder| builder).await?), url)
        }
        None => (file_of_its_own(context).await?, "a fresh SQLite file".to_owned()),
    };
    let limiter = match &stage {
        Stage::File { limiter, .. } => limiter.clone(),
        Stage::Namespace(fresh) => fresh.limiter.clone(),
    };
    let played = play(&args, &limiter, &store, context).await;
    context.printer.wipe_view();
    drop(limiter);
    // Whatever became of it, nothing is left behind.
    let tidied = match stage {
        Stage::File { limiter, folder } => {
            // The store closes its file before the folder goes.
            drop(limiter);
            folder.close().map_err(|error| {
                let message = "the folder of the demo could not be removed";
                Failure::new(ExitStatus::Error, message).caused_by(&error)
            })
        }
        Stage::Namespace(fresh) => fresh.remove(&mut context.printer).await,
    };
    let status = played?;
    tidied.map(|()| status)
}

async fn file_of_its_own(context: &Context) -> Result<Stage, Failure> {
    let folder = tempfile::Builder::new().prefix("zae-limiter-demo-").tempdir();
    let folder = folder.map_err(|error| {
        let failure = Failure::new(ExitStatus::Error, "no temporary folder can be made");
        failure.caused_by(&error).hint("name a store: --store memory:")
    })?;
    let url = format!("sqlite:{}", folder.path().join("limits.db").display());
    let limiter = context.builder_on(&url)?.open().await?;
    Ok(Stage::File { limiter, folder })
}

async fn play(
    args: &Args,
    limiter: &RateLimiter,
    store: &str,
    context: &mut Context,
) -> Result<ExitStatus, Failure> {
    cast::set_up(limiter).await?;
    let show = Show::on(&context.printer);
    if matches!(show, Show::Picture | Show::Lines) {
        let head = context.printer.paint(Look::Head, "A day in the life of a gateway");
        context.printer.line(format!("{head}, in {} s, on {store}.", args.seconds));
        let columns = context.printer.terminal.columns().min(80);
        context.printer.line(line::wrap(cast::INTRODUCTION, columns));
        context.printer.line("");
    }
    let seconds = Duration::from_secs(args.seconds.into());
    let (tally, ending) = play::run(limiter, context, show, seconds, args.seed).await?;
    let report = report::Report::new(&tally, limiter, args, store).await?;
    context.printer.wipe_view();
    if show == Show::Lines {
        context.printer.line("");
    }
    report.print(&mut context.printer);
    Ok(match ending {
        _ if !report.is_sound() => ExitStatus::Error,
        Some(interrupt) => interrupt.status(),
        None => ExitStatus::Done,
    })
}
