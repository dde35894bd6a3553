//! The command line of zae-limiter as a library. The program calls [`main`] with the real
//! [`World`]; a test calls [`run`] with a world of its own.

mod chart;
mod cli;
mod columns;
mod commands;
mod context;
mod exit;
mod failure;
mod figures;

pub mod grammar;
mod interrupts;
mod line;
mod listing;
mod overadmission;
mod printer;
mod reference;
mod replacing;
mod scratch;
mod status;
mod stored;
mod suggestion;
mod vars;
#[cfg(any(test, not(feature = "aws")))]
mod without_aws;
mod world;

use std::process::ExitCode;

use clap::CommandFactory as _;
use clap::error::ErrorKind;

pub use crate::exit::ExitStatus;
pub use crate::interrupts::{Interrupt, Interrupter, Interrupts};
pub use crate::reference::reference;
pub use crate::world::{Terminal, TerminalSize, World};

use crate::cli::{Cli, Command, peek_option};
use crate::context::Context;
use crate::failure::Failure;
use crate::printer::{Color, Output, Printer};

/// Runs the program in the real world.
pub fn main(world: World) -> ExitCode {
    // Before the signals have handlers: nobody may read what is wrong with the arguments.
    let (command, mut context) = match read(world) {
        Ok(read) => read,
        Err(status) => return status.into(),
    };
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = match runtime {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("error: could not start the async runtime: {error}");
            return ExitStatus::Error.into();
        }
    };
    let status = runtime.block_on(async {
        context.interrupts = Interrupts::of_this_process();
        execute(command, context).await
    });
    // Waits for no blocking call, for example one on a network folder that hangs.
    runtime.shutdown_background();
    status.into()
}

/// Runs one command line.
pub async fn run(world: World) -> ExitStatus {
    match read(world) {
        Ok((command, context)) => execute(command, context).await,
        Err(status) => status,
    }
}

/// Reads the arguments. `Err`: they ask for help, or are wrong, and that is printed.
fn read(mut world: World) -> Result<(Command, Context), ExitStatus> {
    let color = color_of(&world);
    let stdout = std::mem::replace(&mut world.stdout, Box::new(std::io::sink()));
    let stderr = std::mem::replace(&mut world.stderr, Box::new(std::io::sink()));
    let mut printer = Printer::new(stdout, stderr, world.terminal.clone(), color);
    match Cli::read(&world.args) {
        Ok(cli) => Ok((cli.command, Context::new(cli.globals, world, printer))),
        Err(error) => {
            if peek_option(&world.args, "--output", Some("-o")).as_deref() == Some("json") {
                printer.output = Output::Json;
            }
            #[cfg(not(feature = "aws"))]
            if let Some(failure) = without_aws::missing_command(&error) {
                printer.failure(&failure);
                return Err(failure.status);
            }
            Err(print_usage(&mut printer, &error))
        }
    }
}

async fn execute(command: Command, mut context: Context) -> ExitStatus {
    let result = dispatch(command, &mut context).await;
    let result = match (result, context.printer.take_error()) {
        (Ok(ExitStatus::Done), Some(error)) => {
            Err(Failure::new(ExitStatus::Error, "could not write the output").caused_by(&error))
        }
        (result, _) => result,
    };
    context.printer.wipe_progress();
    result.unwrap_or_else(|failure| {
        let store = context.store_url().unwrap_or_default();
        let failure = failure.or_locked(&store);
        context.printer.failure(&failure);
        failure.status
    })
}

async fn dispatch(command: Command, context: &mut Context) -> Result<ExitStatus, Failure> {
    match command {
        // These handle interrupts themselves: they have leases or results to finish.
        Command::Acquire(args) => commands::acquire::run(args, context).await,
        Command::Bench(args) => commands::bench::run(args, context).await,
        Command::Demo(args) => commands::demo::run(args, context).await,
        #[cfg(feature = "aws")]
        Command::Aggregate(args) => Box::pin(commands::aggregate::run(args, context)).await,
        other => {
            let mut interrupts = context.interrupts.clone();
            context.end_after_an_interrupt();
            tokio::select! {
                result = dispatch_plain(other, context) => result,
                interrupt = interrupts.next() => Ok(interrupt.status()),
            }
        }
    }
}

/// Commands that can be dropped at any moment: they change things in one step, or a repeated run
/// finishes the rest.
async fn dispatch_plain(command: Command, context: &mut Context) -> Result<ExitStatus, Failure> {
    match command {
        Command::Acquire(_) | Command::Bench(_) | Command::Demo(_) => {
            unreachable!("handled before")
        }
        #[cfg(feature = "aws")]
        Command::Aggregate(_) => unreachable!("handled before"),
        Command::Available(args) => commands::available::run(args, context).await,
        Command::Entity(args) => commands::entity::run(args, context).await,
        Command::Resource(args) => commands::resource::run(args, context).await,
        Command::System(args) => commands::system::run(args, context).await,
        Command::Namespace(args) => commands::namespace::run(args, context).await,
        Command::Sweep(args) => commands::sweep::run(args, context).await,
        Command::Usage(args) => commands::usage::run(args, context).await,
        Command::Audit(args) => commands::audit::run(args, context).await,
        #[cfg(feature = "aws")]
        Command::Deploy(args) => commands::deploy::run(args, context).await,
        #[cfg(feature = "aws")]
        Command::Delete(args) => commands::delete::run(args, context).await,
        #[cfg(feature = "aws")]
        Command::Status(args) => commands::status::run(args, context).await,
        #[cfg(feature = "aws")]
        Command::List(args) => commands::list::run(args, context).await,
        #[cfg(feature = "aws")]
        Command::Upgrade(args) => commands::upgrade::run(args, context).await,
        #[cfg(feature = "aws")]
        Command::Check(args) => commands::check::run(args, context).await,
        #[cfg(feature = "aws")]
        Command::CfnTemplate(args) => commands::cfn_template::run(args, context),
        #[cfg(feature = "aws")]
        Command::LambdaExport(args) => commands::lambda_export::run(args, context),
        #[cfg(feature = "aws")]
        Command::Local(args) => commands::local::run(args, context).await,
        Command::Completions(args) => commands::completions::run(args, context),
        Command::Version(args) => commands::version::run(args, context),
    }
}

/// The value of `--color`, even in arguments that clap rejects.
fn color_of(world: &World) -> Color {
    match peek_option(&world.args, "--color", None).as_deref() {
        Some("always") => Color::Always,
        Some("never") => Color::Never,
        _ if world.env.get(vars::NO_COLOR.name).is_some_and(|value| !value.is_empty()) => {
            Color::Never
        }
        _ => Color::Auto,
    }
}

/// Prints clap's output: help, the version, or an error about the arguments.
fn print_usage(printer: &mut Printer, error: &clap::Error) -> ExitStatus {
    let is_asked_for = matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion);
    let text = error.render();
    if is_asked_for {
        let text = if printer.colors_on_out() { text.ansi().to_string() } else { text.to_string() };
        printer.write(&text);
        return ExitStatus::Done;
    }
    if printer.is_json() {
        printer.failure(&usage_failure(&text.to_string()));
    } else {
        let text = if printer.colors_on_err() { text.ansi().to_string() } else { text.to_string() };
        printer.write_err(&text);
    }
    ExitStatus::Usage
}

/// The first paragraph of clap's error as the message, and the rest as the hint.
fn usage_failure(text: &str) -> Failure {
    let (message, rest) = text.split_once("\n\n").unwrap_or((text, ""));
    let message = message.trim_start_matches("error: ").split_whitespace().collect::<Vec<_>>();
    let failure = Failure::usage(message.join(" "));
    match rest.trim_end_matches("For more information, try '--help'.\n").trim_end() {
        "" => failure.hint("try --help"),
        rest => failure.hint(rest),
    }
}

/// The clap command, for completions and the reference.
pub fn command() -> clap::Command {
    Cli::command()
}
