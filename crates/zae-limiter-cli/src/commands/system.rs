//! `system`: the default limits of all resources, and the policy for an unavailable store.

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{ArgGroup, Subcommand};
use zae_limiter::model::ConfigLevel;
use zae_limiter::{Config, Limit, OnUnavailable};

use crate::columns::{Cell, print_fields};
use crate::context::{Context, Yes};
use crate::exit::ExitStatus;
use crate::failure::Failure;
use crate::grammar;
use crate::printer::count;
use crate::replacing::{Change, replace};
use crate::stored::{self, ConfigJson};

const AFTER_HELP: &str = "\
Examples:
  zae-limiter system set-defaults -l rpm:60
  zae-limiter system set-defaults --on-unavailable allow
  zae-limiter system get-defaults";

const SET_AFTER_HELP: &str = "\
Examples:
  zae-limiter system set-defaults -l rpm:60 -l tpm:5000
  zae-limiter system set-defaults --on-unavailable allow    the limits stay as they are

Each entity gets these limits on each resource for which nothing else is stored. They replace all
stored system defaults. On a terminal the command asks before a limit is dropped.";

const GET_AFTER_HELP: &str = "\
Examples:
  zae-limiter system get-defaults
  zae-limiter entity get-limits key-1 -r gpt-4 --effective   the limits that apply to one entity";

const DELETE_AFTER_HELP: &str = "\
Examples:
  zae-limiter system delete-defaults
  zae-limiter system delete-defaults --yes    without asking

Afterwards only resource and entity limits apply, and calls fail while the store is unavailable. The
retention of audit events stays as deployed.";

/// Arguments of `system`.
#[derive(clap::Args, Debug)]
#[command(after_help = AFTER_HELP, arg_required_else_help = true)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
#[expect(clippy::enum_variant_names, reason = "the names of the commands")]
enum Command {
    /// Set the default limits of all resources, or the policy
    SetDefaults(SetArgs),
    /// Show the default limits of all resources, and the policy
    GetDefaults(GetArgs),
    /// Delete the default limits of all resources, and the policy
    DeleteDefaults(DeleteArgs),
}

/// Arguments of `system set-defaults`.
#[derive(clap::Args, Debug)]
#[command(after_help = SET_AFTER_HELP)]
#[command(group = ArgGroup::new("settings").required(true).multiple(true))]
pub(crate) struct SetArgs {
    /// Limit, as in rpm:100 or tpm:10000/min:15000; repeat for each limit
    #[arg(
        short, long = "limit", group = "settings", value_name = "LIMIT",
        value_parser = grammar::limit,
    )]
    limits: Vec<Limit>,

    /// Policy while the store is unavailable: allow lets calls pass, block fails them
    #[arg(long, group = "settings", value_name = "POLICY", value_parser = policies())]
    on_unavailable: Option<OnUnavailable>,

    #[command(flatten)]
    yes: Yes,
}

fn policies() -> impl TypedValueParser<Value = OnUnavailable> {
    let words = [OnUnavailable::Allow, OnUnavailable::Block].map(OnUnavailable::as_str);
    PossibleValuesParser::new(words).try_map(|word| word.parse())
}

/// Arguments of `system get-defaults`.
#[derive(clap::Args, Debug)]
#[command(after_help = GET_AFTER_HELP)]
pub(crate) struct GetArgs {}

/// Arguments of `system delete-defaults`.
#[derive(clap::Args, Debug)]
#[command(after_help = DELETE_AFTER_HELP)]
pub(crate) struct DeleteArgs {
    #[command(flatten)]
    yes: Yes,
}

pub(crate) async fn run(args: Args, context: &mut Context) -> Result<ExitStatus, Failure> {
    match args.command {
        Command::SetDefaults(args) => set(args, context).await,
        Command::GetDefaults(args) => get(args, context).await,
        Command::DeleteDefaults(args) => delete(args, context).await,
    }
}

fn nothing() -> Failure {
    Failure::new(ExitStatus::NotFound, "nothing is stored for the system")
        .hint("zae-limiter system set-defaults -l rpm:100")
}

async fn set(args: SetArgs, context: &mut Context) -> Result<ExitStatus, Failure> {
    let limiter = context.limiter().await?;
    let change = Change {
        level: ConfigLevel::System,
        // Without limits only the policy changes.
        limits: (!args.limits.is_empty()).then_some(args.limits),
        on_unavailable: args.on_unavailable,
        yes: args.yes,
    };
    let replaced = replace(change, &limiter, context).await?;
    let config = &replaced.config;
    let words = match config.limits.is_empty() {
        true => format!("{}; default limits: none", policy_words(config)),
        false => format!("{}; {}", stored::set_words(config), policy_words(config)),
    };
    replaced.print(&words, context);
    Ok(ExitStatus::Done)
}

fn policy_words(config: &Config) -> &'static str {
    match config.on_unavailable {
        Some(OnUnavailable::Allow) => "calls pass while the store is unavailable",
        _ => "calls fail while the store is unavailable",
    }
}

async fn get(GetArgs {}: GetArgs, context: &mut Context) -> Result<ExitStatus, Failure> {
    let limiter = context.limiter().await?;
    let config = limiter.system_defaults().await?.ok_or_else(nothing)?;
    if context.printer.is_json() {
        context.printer.json(&ConfigJson::from(&config));
        return Ok(ExitStatus::Done);
    }
    let limits = stored::texts(&config.limits.to_limits());
    let policy = config.on_unavailable.map_or("not set (block)", OnUnavailable::as_str);
    let mut fields = vec![
        ("LIMITS", Cell::from(if limits.is_empty() { "-" } else { &limits })),
        ("ON UNAVAILABLE", Cell::from(policy)),
    ];
    if let Some(days) = config.audit_retention_days {
        fields.push(("AUDIT EVENTS KEPT", Cell::from(count(days.into(), "day"))));
    }
    print_fields(&mut context.printer, fields);
    Ok(ExitStatus::Done)
}

async fn delete(args: DeleteArgs, context: &mut Context) -> Result<ExitStatus, Failure> {
    let limiter = context.limiter().await?;
    let config = limiter.system_defaults().await?;
    let config = config.filter(|config| !config.sets_nothing()).ok_or_else(nothing)?;
    context.confirm(args.yes, &stored::deletion(&config)).await?;
    limiter.delete_system_defaults().await?;
    stored::print_deleted(&mut context.printer, &config);
    Ok(ExitStatus::Done)
}
