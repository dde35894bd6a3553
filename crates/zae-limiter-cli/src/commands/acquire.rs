//! `acquire`

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::time::Duration;

use serde::Serialize;
use zae_limiter::model::{EntityId, MILLI, Millitokens, ResourceName, likely, nearest};
use zae_limiter::{Error, Lease, Limit, LimitStatus, RateLimiter};

use crate::context::Context;
use crate::exit::ExitStatus;
use crate::failure::Failure;
use crate::grammar::{self, Adjustment, Amount};
use crate::interrupts::Interrupt;
use crate::status::{self, StatusJson};
use crate::suggestion::with_meant_resource;

mod child;

const AFTER_HELP: &str = "\
Examples:
  zae-limiter acquire key-1 gpt-4 -c rpm:1 -c tpm:500
  zae-limiter acquire key-1 gpt-4 -c tpm:500 --wait 10s         wait up to 10 s
  zae-limiter acquire key-1 gpt-4 -c tpm:500 --adjust tpm:230   the call used 730
  zae-limiter acquire nightly backup -c runs:1 -l runs:3/day -- ./backup.sh

A full bucket of runs:3/day admits 3 runs at once and earns one more every 8 hours: up to 6 in 24
hours. For at most 3 in any 24 hours, use runs:2/day:1.

Exit status: 0 admitted, 5 refused. With a command: the command's own status. If the command fails
or is interrupted, the tokens are refunded.";

/// Arguments of `acquire`.
#[derive(clap::Args, Debug)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct Args {
    /// Entity that calls, such as an API key
    #[arg(value_parser = grammar::entity_id)]
    entity: EntityId,

    /// Resource that it calls, such as a model
    #[arg(value_parser = grammar::resource)]
    resource: ResourceName,

    /// Tokens to take from a limit, as in tpm:500; repeat for each limit
    #[arg(
        short, long, required = true, value_name = "LIMIT:TOKENS",
        value_parser = grammar::amount,
    )]
    consume: Vec<Amount>,

    /// Limit for this call instead of the stored ones, as in rpm:100 or tpm:10000/min:15000
    #[arg(short, long = "limit", value_name = "LIMIT", value_parser = grammar::limit)]
    limits: Vec<Limit>,

    /// Difference to add to the taken tokens, as in tpm:1500 or tpm:-200; never refused, may leave
    /// the bucket in debt
    #[arg(long, value_name = "LIMIT:DIFFERENCE", value_parser = grammar::adjustment)]
    adjust: Vec<Adjustment>,

    /// Longest time to wait for the tokens, as in 10s or 5min
    #[arg(short, long, value_name = "DURATION", value_parser = grammar::duration)]
    wait: Option<Duration>,

    /// Command to run once the tokens are taken; if it fails, they are refunded
    #[arg(last = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

#[derive(Serialize)]
struct AcquireJson {
    admitted: bool,
    degraded: bool,
    retry_after_seconds: f64,
    limits: Vec<StatusJson>,
}

/// How the taking ended.
enum Taken {
    Admitted(Lease),
    Refused(Box<zae_limiter::RateLimitExceeded>),
    Interrupted(Interrupt),
}

pub(crate) async fn run(args: Args, context: &mut Context) -> Result<ExitStatus, Failure> {
    check_adjustments(&args)?;
    let mut interrupts = context.interrupts.clone();
    let limiter = tokio::select! {
        limiter = context.limiter() => limiter?,
        interrupt = interrupts.next() => return Ok(interrupt.status()),
    };
    let mut lease = match take(&args, &limiter, context).await? {
        Taken::Admitted(lease) => lease,
        Taken::Refused(refusal) => {
            let (statuses, wait) = (refusal.statuses(), refusal.retry_after());
            print(&args, context, Outcome { admitted: false, degraded: false, wait, statuses });
            return Ok(ExitStatus::Refused);
        }
        Taken::Interrupted(interrupt) => return Ok(interrupt.status()),
    };
    let mut statuses = lease.statuses();
    if args.command.is_empty() {
        adjust(&args, &mut lease)?;
        if let Err(error) = lease.flush().await {
            // The tokens stay taken, as after a commit that fails.
            lease.commit().await?;
            return Err(error.into());
        }
        if !read_left(&args, &limiter, context, &mut statuses).await {
            show_adjusted(&args, &mut statuses);
        }
        print(&args, context, Outcome::admitted(&lease, &statuses));
        lease.commit().await?;
        return Ok(ExitStatus::Done);
    }
    read_left(&args, &limiter, context, &mut statuses).await;
    print(&args, context, Outcome::admitted(&lease, &statuses));
    let ran = child::run(&args.command, context).await;
    let settled = match ran {
        Ok(ExitStatus::Done) => {
            adjust(&args, &mut lease)?;
            lease.commit().await
        }
        _ => lease.rollback().await,
    };
    match (&ran, settled) {
        // The status says what the command did, also where the tokens could not be settled.
        (_, Err(error)) => context.printer.failure(&error.into()),
        (Ok(ExitStatus::Done) | Err(_), Ok(())) => {}
        (Ok(status), Ok(())) => {
            let code = status.code();
            context.printer.detail(format!("refunded: the command exited with status {code}"));
        }
    }
    ran
}

/// The sum of the adjustments of each limit. A lease gets one difference for each: on the way to the sum, it could
/// refund more than it holds.
fn differences(args: &Args) -> BTreeMap<&str, i64> {
    let mut sums = BTreeMap::new();
    for adjustment in &args.adjust {
        let sum: &mut i64 = sums.entry(adjustment.limit.as_str()).or_default();
        *sum = sum.saturating_add(adjustment.difference);
    }
    sums
}

/// Rejects adjustments that could only fail after the command has run.
fn check_adjustments(args: &Args) -> Result<(), Failure> {
    for (limit, difference) in differences(args) {
        let taken = args.consume.iter().filter(|amount| amount.limit == limit);
        let taken: Vec<u64> = taken.map(|amount| amount.tokens).collect();
        if taken.is_empty() {
            let names: BTreeSet<&str> = args.consume.iter().map(|it| it.limit.as_str()).collect();
            let names = nearest(limit, names);
            let failure = Failure::usage(format!("--adjust names {limit}, which is not taken"));
            return Err(failure.hint(match likely(limit, &names) {
                Some(meant) => {
                    let names = names.join(", ");
                    format!("did you mean {meant}? taken: {names}   (else add -c {limit}:0)")
                }
                None => format!("add -c {limit}:0"),
            }));
        }
        let taken = taken.into_iter().fold(0, u64::saturating_add);
        if difference < 0 && difference.unsigned_abs() > taken {
            let message =
                format!("--adjust {limit}:{difference} refunds more than the {taken} taken");
            return Err(match taken {
                0 => Failure::usage(format!(
                    "no tokens of {limit} are taken, so none can be refunded"
                ))
                .hint(format!("take some: -c {limit}:{}", difference.unsigned_abs())),
                _ => Failure::usage(message).hint(format!("use {limit}:-{taken} at most")),
            });
        }
    }
    Ok(())
}

/// Takes the tokens, waiting for up to `--wait`. The loop is that of `Acquire::wait_up_to`, with progress and
/// interrupts in between.
async fn take(args: &Args, limiter: &RateLimiter, context: &mut Context) -> Result<Taken, Failure> {
    let mut interrupts = context.interrupts.clone();
    let patience = args.wait.unwrap_or_default();
    // Not the time of day: it may be set meanwhile.
    let started = context.pace.stopwatch();
    loop {
        let mut acquire = limiter.acquire(args.entity.as_str(), args.resource.as_str());
        for amount in &args.consume {
            acquire = acquire.take(&amount.limit, amount.tokens);
        }
        if !args.limits.is_empty() {
            acquire = acquire.limits(args.limits.iter().cloned());
        }
        let result = tokio::select! {
            result = async { acquire.await } => result,
            // The dropped call gives back what it may have taken.
            interrupt = interrupts.next() => return Ok(Taken::Interrupted(interrupt)),
        };
        let refusal = match result {
            Ok(lease) => return Ok(Taken::Admitted(lease)),
            Err(Error::Exceeded(refusal)) => refusal,
            Err(error) => return Err(with_meant_resource(error, limiter).await),
        };
        let waited = context.pace.stopwatch().saturating_sub(started);
        let wait = refusal.retry_after();
        // More than is left of the caller's patience: better to say so at once.
        if waited.saturating_add(wait) > patience {
            return Ok(Taken::Refused(refusal));
        }
        let primary = refusal.primary_violation();
        context.printer.progress(format!(
            "waiting {} for {} of {}",
            status::wait(wait),
            primary.limit_name,
            primary.entity_id
        ));
        tokio::select! {
            () = context.wait(wait) => {}
            interrupt = interrupts.next() => return Ok(Taken::Interrupted(interrupt)),
        }
    }
}

fn adjust(args: &Args, lease: &mut Lease) -> Result<(), Failure> {
    for (limit, difference) in differences(args) {
        lease.adjust(limit, difference)?;
    }
    Ok(())
}

/// Reads the printed balances on DynamoDB, where this process has seen only one shard of a bucket. Returns `false` if
/// that is not needed or not possible; then the lease's own figures are printed.
async fn read_left(
    args: &Args,
    limiter: &RateLimiter,
    context: &Context,
    statuses: &mut [LimitStatus],
) -> bool {
    // With limits of its own, a call does not go by the stored ones.
    if !context.is_on_dynamodb() || !args.limits.is_empty() {
        return false;
    }
    let (entity, resource) = (args.entity.as_str(), args.resource.as_str());
    let Ok(read) = limiter.available(entity, resource, &[]).await else { return false };
    for status in statuses {
        let same = |other: &&LimitStatus| {
            other.entity_id == status.entity_id && other.limit_name == status.limit_name
        };
        if let Some(other) = read.iter().find(same) {
            status.available = other.available;
        }
    }
    true
}

/// Applies the adjustments to the printed balances, which saves another read.
fn show_adjusted(args: &Args, statuses: &mut [LimitStatus]) {
    let differences = differences(args);
    for status in statuses {
        let Some(difference) = differences.get(status.limit_name.as_str()) else { continue };
        let credit = Millitokens::new(difference.saturating_mul(-MILLI));
        let available = status.available.saturating_add(credit);
        status.available = available.min(status.rate.capacity());
    }
}

struct Outcome<'a> {
    admitted: bool,
    degraded: bool,
    wait: Duration,
    statuses: &'a [LimitStatus],
}

impl<'a> Outcome<'a> {
    fn admitted(lease: &Lease, statuses: &'a [LimitStatus]) -> Self {
        Self { admitted: true, degraded: lease.is_degraded(), wait: Duration::ZERO, statuses }
    }
}

fn print(args: &Args, context: &mut Context, outcome: Outcome<'_>) {
    let printer = &mut context.printer;
    if outcome.degraded {
        printer.warn("the store is unavailable and its policy allows calls: nothing was taken");
    }
    if printer.is_json() {
        let document = AcquireJson {
            admitted: outcome.admitted,
            degraded: outcome.degraded,
            retry_after_seconds: status::seconds(outcome.wait),
            limits: outcome.statuses.iter().map(StatusJson::from).collect(),
        };
        // With a command, stdout belongs to the command.
        if args.command.is_empty() || !outcome.admitted {
            printer.json(&document);
        } else {
            printer.write_err(&format!("{}\n", crate::printer::to_json(&document)));
        }
        return;
    }
    if args.command.is_empty() && !outcome.statuses.is_empty() {
        status::print_table(printer, outcome.statuses);
    }
    if !outcome.admitted {
        printer.say(format!("refused; the same call passes in {}", status::wait(outcome.wait)));
    }
}
