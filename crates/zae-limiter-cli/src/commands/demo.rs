//! `demo`: simulates a busy gateway.

use std::time::Duration;

use zae_limiter::RateLimiter;

use crate::context::Context;
use crate::exit::ExitStatus;
use crate::failure::Failure;
use crate::line;
use crate::printer::Look;
use crate::scratch::ScratchNamespace;

mod cast;
mod folder;
mod play;
mod report;
mod tally;
mod traffic;
mod view;

#[cfg(test)]
mod tests;

use folder::Folder;
use view::Show;

const AFTER_HELP: &str = "\
An organisation has two projects with three API keys each. Every call takes one request and an
estimate of its tokens from its key, its project and the organisation, all or nothing. When the call
is done, it settles for what it really used. Some calls fail, and their tokens are refunded. There
is more traffic than the limits allow.

At the end, the over-admission check compares the admitted tokens with the limits, in every interval
of the run. It also compares the store's usage records with the settled amounts.

Examples:
  zae-limiter demo
  zae-limiter demo --seconds 10 --seed 7
  zae-limiter demo --store memory: -o json
  zae-limiter demo --store sqlite:limits.db     in a temporary namespace

Exit status: 0 nothing was over-admitted, 1 something was, 130 interrupted by Ctrl-C (prints the
summary).";

/// Arguments of `demo`.
#[derive(clap::Args, Debug)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct Args {
    /// Length of the run in seconds, 1 to 3600
    #[arg(
        long, value_name = "N", default_value_t = 30,
        value_parser = clap::value_parser!(u16).range(1..=3_600),
    )]
    seconds: u16,

    /// Seed of the simulated traffic
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
}

/// The store of the demo.
enum Stage {
    /// A SQLite file in a temporary folder.
    File { limiter: RateLimiter, folder: Folder },
    /// A temporary namespace of the chosen store.
    Namespace(ScratchNamespace),
}

pub(crate) async fn run(args: Args, context: &mut Context) -> Result<ExitStatus, Failure> {
    let (stage, store) = match context.chosen_store_url()? {
        Some(url) => (
            Stage::Namespace(ScratchNamespace::open(context, "demo", |builder| builder).await?),
            url,
        ),
        None => (temporary_file(context).await?, "a fresh SQLite file".to_owned()),
    };
    let limiter = match &stage {
        Stage::File { limiter, .. } => limiter.clone(),
        Stage::Namespace(scratch) => scratch.limiter.clone(),
    };
    let played = play(&args, &limiter, &store, context).await;
    context.printer.wipe_view();
    drop(limiter);
    // Also after a failed run.
    let cleaned = match stage {
        Stage::File { limiter, folder } => {
            // The store must close its file before the folder is removed.
            drop(limiter);
            folder.close().map_err(|error| {
                let message = "could not remove the temporary folder of the demo";
                Failure::new(ExitStatus::Error, message).caused_by(&error)
            })
        }
        Stage::Namespace(scratch) => scratch.remove(context).await,
    };
    let status = played?;
    cleaned.map(|()| status)
}

async fn temporary_file(context: &Context) -> Result<Stage, Failure> {
    let folder = Folder::create(&std::env::temp_dir()).map_err(|error| {
        let failure = Failure::new(ExitStatus::Error, "could not create a temporary folder");
        failure.caused_by(&error).hint("use another store: --store memory:")
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
