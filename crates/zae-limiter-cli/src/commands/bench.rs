//! `bench`

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use zae_limiter::model::{CAPACITY_MAX, EntityId, LimitName, LimitSet, ResourceName};
use zae_limiter::testing::Clock;
use zae_limiter::{Limit, RateLimiter, SqliteStore, StoreUrl};

use crate::context::Context;
use crate::exit::ExitStatus;
use crate::failure::Failure;
use crate::grammar::{self, Amount};
use crate::scratch::{RUN_MAX, ScratchNamespace};
use crate::suggestion::limits_that_hold;

mod check;
mod histogram;
mod load;
mod report;
#[cfg(feature = "aws")]
mod shards;

use check::Watched;
use load::{FirstCalls, Length, Load};
use report::{BenchJson, Setting};

const AFTER_HELP: &str = "\
bench creates entities in a temporary namespace and purges it at the end. Without -c and -l the
limits are so high that every call is admitted. With --entity it calls an existing entity of the
chosen namespace instead, with the stored limits or those of -l, and deletes nothing.

Before the warm-up, bench calls every entity once and refunds the tokens, so that the measurement
creates no buckets. It skips these calls with --warm-up 0s, and with --each if there are fewer calls
than entities. No run takes longer than 12 hours.

A bench that is killed leaves its namespace behind; `namespace list` shows it. The next bench or
demo on the store removes it once it is a day old.

--shards shows the effect of splitting a hot bucket. DynamoDB accepts about 1,000 writes a second
for one item. A bucket with more writes is split into 2, 4, up to 64 items, its shards. For each
number N, bench creates a bucket, splits it into N shards, and runs the load on it. The table
compares the rows: acquires a second, their ratio to the first row, latency, and cost.

The callers of --shards run in several simulated processes (--processes). Within one process,
waiting callers share one write to one shard, so shards make no difference there. An endpoint on
this machine does not throttle items: there, the rows only show less contention between processes.
--duration applies to each row. The deadline of a call is 10 s instead of 1 s, so that slow calls
do not count as failed. --shards excludes --entities, --entity and --compare.

Examples:
  zae-limiter bench                                       10 s, 64 callers, 1,000 entities
  zae-limiter bench --store memory: --entities 100000
  zae-limiter bench --store 'sqlite:/var/tmp/b.db?durability=full' -o json > earlier.json
  zae-limiter bench --compare earlier.json                ratios to an earlier result
  zae-limiter bench -l rpm:600 -c rpm:1 --each 1000       with refusals; 1,000 calls per caller
  zae-limiter bench --entity key-1 --resource gpt-4       on the limits of key-1
  zae-limiter bench --store dynamodb:my-app --shards 1,8   one bucket with 1 and with 8 shards
  zae-limiter bench --name my-app --shards 1,8,1,8         twice, to see the noise

Exit status: 0 nothing was over-admitted, 1 something was, 3 some calls failed because the store
was unavailable, 130 interrupted by Ctrl-C (prints the results so far).";

/// The default amounts of each call.
const AMOUNTS: [(&str, u64); 2] = [("rpm", 1), ("tpm", 100)];

/// Arguments of `bench`.
#[derive(clap::Args, Debug)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct Args {
    /// Number of entities
    #[arg(
        long, value_name = "N", default_value_t = 1_000,
        value_parser = clap::value_parser!(u32).range(1..=1_000_000),
    )]
    entities: u32,

    /// Number of concurrent callers
    #[arg(
        long, value_name = "N", default_value_t = 64,
        value_parser = clap::value_parser!(u16).range(1..=4_096),
    )]
    concurrency: u16,

    /// Time to measure [default: 10s]
    #[arg(long, value_parser = grammar::duration, conflicts_with = "each")]
    duration: Option<Duration>,

    /// Time under load before the measurement [default: 1s; with --each 0s]
    #[arg(long, value_name = "DURATION", value_parser = grammar::duration)]
    warm_up: Option<Duration>,

    /// Stop after this many calls of each caller instead of --duration
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1_000_000_000))]
    each: Option<u64>,

    /// Call this existing entity instead of temporary ones
    #[arg(long, value_name = "ID", value_parser = grammar::entity_id, conflicts_with = "entities")]
    entity: Option<EntityId>,

    /// Tokens that each call takes from a limit, as in tpm:500 [default: 1 from every limit]
    #[arg(short, long, value_name = "LIMIT:TOKENS", value_parser = grammar::amount)]
    consume: Vec<Amount>,

    /// Limit of the entities, as in rpm:100 or tpm:10000/min:15000
    #[arg(short, long = "limit", value_name = "LIMIT", value_parser = grammar::limit)]
    limits: Vec<Limit>,

    /// Resource that the calls name
    #[arg(long, value_name = "NAME", default_value = "bench", value_parser = grammar::resource)]
    resource: ResourceName,

    /// Measure one bucket with these numbers of shards, one row each, as in 1,8
    #[arg(
        long, value_name = "N,N", value_delimiter = ',', value_parser = grammar::shards,
        conflicts_with_all = ["entities", "entity", "compare"],
    )]
    shards: Vec<u32>,

    /// Number of simulated processes for --shards [default: 8, at most one per caller]
    #[arg(
        long, value_name = "N", requires = "shards",
        value_parser = clap::value_parser!(u16).range(1..=64),
    )]
    processes: Option<u16>,

    /// Compare with an earlier result of bench -o json
    #[arg(long, value_name = "FILE")]
    compare: Option<PathBuf>,
}

pub(crate) async fn run(args: Args, context: &mut Context) -> Result<ExitStatus, Failure> {
    if args.duration == Some(Duration::ZERO) {
        let failure = Failure::usage("--duration 0s leaves no time to measure");
        return Err(failure.hint("use a longer time, or a number of calls: --each 1000"));
    }
    let time_max = time_max(&args);
    if warm_up(&args).saturating_add(args.duration.unwrap_or_default()) > time_max {
        let hours = time_max.as_secs_f64() / 3_600.0;
        let failure = Failure::usage("the warm-up and the measurement take too long");
        let each = if args.shards.len() > 1 { ", in each row" } else { "" };
        return Err(failure.hint(format!("use {hours} h at most for both{each}")));
    }
    #[cfg(not(feature = "aws"))]
    if !args.shards.is_empty() {
        return Err(crate::without_aws::failure("bench --shards"));
    }
    #[cfg(feature = "aws")]
    if !args.shards.is_empty() {
        return shards::run(&args, context).await;
    }
    // Read before the load, so that a wrong file name fails at once.
    let earlier = args.compare.as_deref().map(BenchJson::read).transpose()?;
    let limits = LimitSet::new(args.limits.iter().cloned()).map_err(zae_limiter::Error::Invalid)?;
    if let Some(entity) = &args.entity {
        let limiter = context.limiter().await?;
        let (amounts, watched) = ask_about(entity, &args, &limits, &limiter).await?;
        return measure(&args, amounts, &watched, limiter, earlier.as_ref(), context).await;
    }
    let (amounts, limits) = made_up(&args, limits)?;
    let entities = usize::try_from(args.entities).expect("a million at most");
    let cache = |builder: zae_limiter::Builder| builder.cache_capacity(entities.max(100_000) * 2);
    let scratch = ScratchNamespace::open(context, "bench", cache).await?;
    let measured = on_made_up(&args, amounts, &limits, &scratch, earlier.as_ref(), context).await;
    // Also after a failed run.
    let cleaned = scratch.remove(context).await;
    let status = measured?;
    cleaned.map(|()| status)
}

/// Amounts and limits of the temporary entities. Missing ones follow from the given ones.
fn made_up(args: &Args, limits: LimitSet) -> Result<(Vec<(String, u64)>, LimitSet), Failure> {
    let mut amounts = sums(&args.consume);
    if amounts.is_empty() {
        amounts = match limits.is_empty() {
            true => AMOUNTS.map(|(name, tokens)| (name.to_owned(), tokens)).to_vec(),
            false => limits.names().iter().map(|name| (name.to_string(), 1)).collect(),
        };
    }
    if limits.is_empty() {
        // High enough to admit every call.
        let high = amounts.iter().map(|(name, _)| Limit::per_second(name, CAPACITY_MAX));
        let limits = LimitSet::new(high).map_err(zae_limiter::Error::Invalid)?;
        return Ok((amounts, limits));
    }
    check_names(&amounts, limits.names().iter().map(LimitName::as_str))?;
    Ok((amounts, limits))
}

/// Rejects amounts of limits that do not hold.
fn check_names<'a>(
    amounts: &[(String, u64)],
    held: impl Iterator<Item = &'a str> + Clone,
) -> Result<(), Failure> {
    let unknown = amounts.iter().find(|(name, _)| held.clone().all(|limit| limit != name));
    let Some((name, _)) = unknown else { return Ok(()) };
    let failure = Failure::usage(format!("-c names {name}, which is not a limit here"));
    Err(failure.hint(limits_that_hold(name, held).expect("the caller has checked that some hold")))
}

/// Adds up the amounts of a limit that is named twice, as an acquire does.
fn sums(consume: &[Amount]) -> Vec<(String, u64)> {
    let mut sums: Vec<(String, u64)> = Vec::new();
    for amount in consume {
        match sums.iter_mut().find(|(name, _)| *name == amount.limit) {
            Some((_, sum)) => *sum = sum.saturating_add(amount.tokens),
            None => sums.push((amount.limit.clone(), amount.tokens)),
        }
    }
    sums
}

async fn on_made_up(
    args: &Args,
    amounts: Vec<(String, u64)>,
    limits: &LimitSet,
    scratch: &ScratchNamespace,
    earlier: Option<&BenchJson>,
    context: &mut Context,
) -> Result<ExitStatus, Failure> {
    let limiter = scratch.limiter.clone();
    limiter.set_resource_defaults(args.resource.as_str(), limits.to_limits()).await?;
    let watched = watch(None, limits, &amounts);
    measure(args, amounts, &watched, limiter, earlier, context).await
}

fn watch(entity: Option<&str>, limits: &LimitSet, amounts: &[(String, u64)]) -> Vec<Watched> {
    let named = limits.iter().filter_map(|(name, rate)| {
        let (_, amount) = amounts.iter().find(|(amount, _)| amount == name.as_str())?;
        Some(Watched {
            entity: entity.map(str::to_owned),
            limit: name.to_string(),
            rate: *rate,
            amount: *amount,
        })
    });
    named.collect()
}

/// The amounts for an existing entity, and the limits of it and its ancestors.
async fn ask_about(
    entity: &EntityId,
    args: &Args,
    limits: &LimitSet,
    limiter: &RateLimiter,
) -> Result<(Vec<(String, u64)>, Vec<Watched>), Failure> {
    let statuses = limiter.available(entity.as_str(), args.resource.as_str(), &[]).await?;
    let own: Vec<String> = match limits.is_empty() {
        true => statuses
            .iter()
            .filter(|status| status.level == 0)
            .map(|s| s.limit_name.to_string())
            .collect(),
        false => limits.names().iter().map(ToString::to_string).collect(),
    };
    if own.is_empty() {
        let failure = Failure::usage(format!("no limits apply to {entity} on {}", args.resource));
        return Err(failure.hint("name its resource with --resource, or pass limits: -l rpm:100"));
    }
    let mut amounts = sums(&args.consume);
    if amounts.is_empty() {
        amounts = own.iter().map(|name| (name.clone(), 1)).collect();
    }
    check_names(&amounts, own.iter().map(String::as_str))?;
    let mut watched = watch(Some(entity.as_str()), limits, &amounts);
    for status in statuses.iter().filter(|status| status.level > 0 || limits.is_empty()) {
        let amount = amounts.iter().find(|(name, _)| name == status.limit_name.as_str());
        if let Some((_, amount)) = amount {
            watched.push(Watched {
                entity: Some(status.entity_id.to_string()),
                limit: status.limit_name.to_string(),
                rate: status.rate,
                amount: *amount,
            });
        }
    }
    Ok((amounts, watched))
}

async fn measure(
    args: &Args,
    amounts: Vec<(String, u64)>,
    watched: &[Watched],
    limiter: RateLimiter,
    earlier: Option<&BenchJson>,
    context: &mut Context,
) -> Result<ExitStatus, Failure> {
    let store = context.store_url()?;
    let baseline = baseline(&store, context).await?;
    let entities: Vec<String> = match &args.entity {
        Some(entity) => vec![entity.to_string()],
        None => (0..args.entities).map(|number| format!("key-{number}")).collect(),
    };
    let load = load_of(args, &amounts, vec![limiter], entities, String::new());
    let setting = Setting {
        store,
        entities: load.entities.len(),
        concurrency: load.concurrency,
        consume: load.consume(),
        limits: watched.iter().map(Watched::to_text).collect(),
        baseline,
    };
    let measured = load::run(load, context).await?;
    let checked = check::check(watched, &measured);
    let mut document = BenchJson::new(setting, &measured, &checked);
    if let Some(failure) = &measured.first_failure {
        report::warn_of(failure, &mut context.printer);
    }
    if let Some(earlier) = earlier {
        document.compare(earlier, &mut context.printer);
    }
    document.print(&checked, &mut context.printer);
    Ok(match measured.interrupt {
        _ if document.over_admitted > 0 => ExitStatus::Error,
        Some(interrupt) => interrupt.status(),
        None if measured.failed > 0 => ExitStatus::Unavailable,
        None => ExitStatus::Done,
    })
}

/// The requested load: callers in these processes, on these entities.
fn load_of(
    args: &Args,
    amounts: &[(String, u64)],
    limiters: Vec<RateLimiter>,
    entities: Vec<String>,
    title: String,
) -> Load {
    Load {
        first_calls: first_calls(args, (limiters.len() * entities.len()) as u64),
        limiters,
        title,
        entities,
        resource: args.resource.to_string(),
        amounts: amounts.to_vec(),
        limits: (args.entity.is_some() && !args.limits.is_empty()).then(|| args.limits.clone()),
        concurrency: usize::from(args.concurrency),
        warm_up: warm_up(args),
        time_max: time_max(args),
        length: match args.each {
            Some(calls) => Length::Calls(calls),
            None => Length::Time(args.duration.unwrap_or(Duration::from_secs(10))),
        },
    }
}

fn warm_up(args: &Args) -> Duration {
    args.warm_up.unwrap_or(Duration::from_secs(u64::from(args.each.is_none())))
}

/// The most time for one load, so that all rows together end within the longest run.
fn time_max(args: &Args) -> Duration {
    let rows = u32::try_from(args.shards.len().max(1)).unwrap_or(u32::MAX);
    RUN_MAX / rows
}

/// Skips the first calls if they are what the user wants to measure.
fn first_calls(args: &Args, first_calls: u64) -> FirstCalls {
    let calls = args.each.map(|each| each.saturating_mul(args.concurrency.into()));
    let is_the_load = calls.is_some_and(|calls| calls < first_calls);
    match args.warm_up {
        Some(warm_up) if warm_up.is_zero() => FirstCalls::InTheLoad,
        _ if is_the_load => FirstCalls::InTheLoad,
        _ => FirstCalls::Before,
    }
}

/// The store's baseline: for SQLite, one hand-written statement per transaction.
async fn baseline(url: &str, context: &mut Context) -> Result<Option<f64>, Failure> {
    let parsed: StoreUrl = url.parse().map_err(zae_limiter::Error::Invalid)?;
    let StoreUrl::Sqlite { path, durability } = parsed else { return Ok(None) };
    context.printer.progress("measuring one UPDATE per transaction");
    let clock: Arc<dyn Clock> = Arc::clone(&context.clock);
    let measured = tokio::task::spawn_blocking(move || {
        SqliteStore::baseline_per_second(&path, durability, &|| clock.stopwatch())
    });
    let baseline = measured.await.expect("it does not panic");
    context.printer.wipe_progress();
    baseline.map_err(|error| zae_limiter::Error::Store(error).into())
}
