//! `bench --shards`: the same load on one bucket with different numbers of shards.
//!
//! A process uses one shard as long as that shard has tokens, so callers of one process would see no
//! difference. The callers therefore run in several simulated processes, each with a store that
//! shares nothing with the others. Every row has its own bucket. The bench splits it before the load,
//! and the stores of the row neither split it further nor merge it.

use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use zae_limiter::dynamodb::aws::{DynamoAddress, LazyTable};
use zae_limiter::model::{EntityId, LimitSet};
use zae_limiter::store::BucketKey;
use zae_limiter::{DynamoOptions, DynamoStore, Error, RateLimiter, StoreUrl};

use crate::columns::{Align, Cell, Columns};
use crate::context::Context;
use crate::exit::ExitStatus;
use crate::failure::Failure;
use crate::figures::grouped;
use crate::interrupts::Interrupt;
use crate::printer::{Look, Printer, count};
use crate::scratch::ScratchNamespace;

use super::check::{self, Checked};
use super::report::{self, BenchJson, Setting, print_checked, ratio};
use super::{Args, load, load_of, made_up, watch};

/// The default number of simulated processes.
const PROCESSES: u16 = 8;

/// The deadline of a call. The default of 1 s would turn the slow calls of a throttled bucket into
/// failed ones; here they must show as latency.
const DEADLINE: Duration = Duration::from_secs(10);

/// The document for scripts.
#[derive(Serialize)]
struct ShardsJson {
    processes: usize,
    over_admitted: i128,
    rows: Vec<RowJson>,
}

/// A row: the number of shards, and a result that `--compare` can read.
#[derive(Serialize)]
struct RowJson {
    shards: u32,
    /// Differs from `shards` if another client split or merged the bucket meanwhile.
    shards_at_end: usize,
    /// Acquires a second, divided by those of the first row.
    ratio: Option<f64>,
    #[serde(flatten)]
    result: BenchJson,
}

pub(super) async fn run(args: &Args, context: &mut Context) -> Result<ExitStatus, Failure> {
    let address = address(&context.store_url()?)?;
    let processes = processes(args)?;
    let limits = LimitSet::new(args.limits.iter().cloned()).map_err(Error::Invalid)?;
    let (amounts, limits) = made_up(args, limits)?;
    let scratch = ScratchNamespace::open(context, "bench", |builder| builder).await?;
    let tables = (0..processes).map(|_| Arc::new(LazyTable::new(address.clone()))).collect();
    let bench = ShardsBench { args, amounts, limits, scratch: &scratch, tables };
    let measured = Box::pin(bench.measure(context)).await;
    // Also after a failed run.
    let cleaned = scratch.remove(context).await;
    let status = measured?;
    cleaned.map(|()| status)
}

fn address(url: &str) -> Result<DynamoAddress, Failure> {
    match url.parse().map_err(Error::Invalid)? {
        StoreUrl::Dynamodb(address) => Ok(address),
        _ => {
            let scheme = url.split(':').next().unwrap_or_default();
            let message =
                format!("--shards needs a dynamodb: store; a {scheme}: store has no shards");
            let hint = "name one: --store dynamodb:TABLE   (on this machine: zae-limiter local up)";
            Err(Failure::usage(message).hint(hint))
        }
    }
}

fn processes(args: &Args) -> Result<u16, Failure> {
    match args.processes {
        None => Ok(PROCESSES.min(args.concurrency)),
        Some(processes) if processes <= args.concurrency => Ok(processes),
        Some(processes) => {
            let message = format!(
                "{processes} processes need at least as many callers, and there are {}",
                args.concurrency
            );
            Err(Failure::usage(message).hint(format!("use --concurrency {processes}, or more")))
        }
    }
}

/// The parameters that all rows share.
struct ShardsBench<'a> {
    args: &'a Args,
    amounts: Vec<(String, u64)>,
    limits: LimitSet,
    scratch: &'a ScratchNamespace,
    /// One for each simulated process, with its own connections.
    tables: Vec<Arc<LazyTable>>,
}

/// The result of a row.
struct Row {
    json: RowJson,
    checked: Vec<Checked>,
    interrupt: Option<Interrupt>,
}

impl ShardsBench<'_> {
    async fn measure(&self, context: &mut Context) -> Result<ExitStatus, Failure> {
        let resource = self.args.resource.as_str();
        self.scratch.limiter.set_resource_defaults(resource, self.limits.to_limits()).await?;
        let mut rows: Vec<Row> = Vec::new();
        for (number, shards) in self.args.shards.iter().enumerate() {
            let mut row = self.row(number + 1, *shards, context).await?;
            let first = rows.first().map_or(&row.json, |first| &first.json);
            let per_second = row.json.result.acquires_per_second;
            row.json.ratio = ratio(per_second, first.result.acquires_per_second);
            rows.push(row);
            if rows.last().is_some_and(|row| row.interrupt.is_some()) {
                break;
            }
        }
        let over_admitted = rows.iter().map(|row| row.json.result.over_admitted).sum();
        let failed: u64 = rows.iter().map(|row| row.json.result.failed).sum();
        let interrupt = rows.iter().find_map(|row| row.interrupt);
        let checked: Vec<Checked> = rows.iter_mut().flat_map(|row| row.checked.drain(..)).collect();
        let rows = rows.into_iter().map(|row| row.json).collect();
        let document = ShardsJson { processes: self.tables.len(), over_admitted, rows };
        document.print(&checked, &mut context.printer);
        Ok(match interrupt {
            _ if over_admitted > 0 => ExitStatus::Error,
            Some(interrupt) => interrupt.status(),
            None if failed > 0 => ExitStatus::Unavailable,
            None => ExitStatus::Done,
        })
    }

    /// Measures a bucket with this number of shards.
    async fn row(&self, number: usize, shards: u32, context: &mut Context) -> Result<Row, Failure> {
        let entity = format!("row-{number}-shards-{shards}");
        let title = format!("{}, ", count(shards.into(), "shard"));
        context.printer.progress(format!("{title}splitting the bucket"));
        let stores: Vec<Arc<DynamoStore>> =
            (0_u64..).zip(&self.tables).map(store(shards)).collect();
        let mut limiters = Vec::new();
        for store in &stores {
            let namespace = self.scratch.limiter.namespace().as_str();
            let builder = context.builder_over(Arc::<DynamoStore>::clone(store));
            limiters.push(builder.namespace(namespace).deadline(DEADLINE).open().await?);
        }
        let bucket = self.make_bucket(&limiters[0], &entity).await?;
        stores[0].split_to(&bucket, shards, context.clock.now()).await.map_err(Error::Store)?;
        let entities = vec![entity.clone()];
        let load = load_of(self.args, &self.amounts, limiters, entities, title);
        let setting = Setting {
            store: context.store_url()?,
            entities: 1,
            concurrency: load.concurrency,
            consume: load.consume(),
            // Without the entity's name: alike in all rows.
            limits: watch(None, &self.limits, &self.amounts).iter().map(|l| l.to_text()).collect(),
            baseline: None,
        };
        let measured = load::run(load, context).await?;
        let found =
            stores[0].shard_count(&bucket, context.clock.now()).await.map_err(Error::Store)?;
        if u32::try_from(found) != Ok(shards) {
            let found = count(found as u64, "shard");
            context.printer.warn(format!(
                "{entity}: another client has resharded the bucket, it has {found} now"
            ));
        }
        if let Some(failure) = &measured.first_failure {
            report::warn_of(failure, &mut context.printer);
        }
        let watched = watch(Some(&entity), &self.limits, &self.amounts);
        let checked = check::check(&watched, &measured);
        let result = BenchJson::new(setting, &measured, &checked);
        let json = RowJson { shards, shards_at_end: found, ratio: None, result };
        Ok(Row { json, checked, interrupt: measured.interrupt })
    }

    /// Creates the bucket of a row with an acquire, and refunds it.
    async fn make_bucket(&self, limiter: &RateLimiter, entity: &str) -> Result<BucketKey, Failure> {
        let mut acquire = limiter.acquire(entity, self.args.resource.as_str());
        for (limit, tokens) in &self.amounts {
            acquire = acquire.take(limit, *tokens);
        }
        acquire.await?.rollback().await?;
        Ok(BucketKey {
            namespace: limiter.namespace_id().clone(),
            entity: EntityId::new(entity).map_err(Error::Invalid)?,
            resource: self.args.resource.clone(),
        })
    }
}

/// Creates the store of a simulated process. The seed makes its choice of shards repeatable.
fn store(shards: u32) -> impl Fn((u64, &Arc<LazyTable>)) -> Arc<DynamoStore> {
    let options = DynamoOptions::default().shards_max(shards).merge_after(Duration::MAX);
    move |(process, table)| {
        let table = Arc::<LazyTable>::clone(table);
        Arc::new(DynamoStore::new(table, options.clone().seed(process)))
    }
}

impl ShardsJson {
    fn print(&self, checked: &[Checked], printer: &mut Printer) {
        if printer.is_json() {
            printer.json(self);
            return;
        }
        let Some(first) = self.rows.first().map(|row| &row.result) else { return };
        let callers = count(first.concurrency as u64, "caller");
        let processes = match self.processes {
            1 => "1 process".to_owned(),
            processes => format!("{processes} processes"),
        };
        for (name, value) in [
            ("store", first.store.clone()),
            ("load", format!("1 bucket for each row, {callers} in {processes}")),
            ("taken", first.consume.join(", ")),
        ] {
            let name = printer.paint(Look::Head, format!("{name:<10}"));
            printer.line(format!("{name}{value}"));
        }
        printer.line("");
        self.print_rows(printer);
        printer.line("TRIPS, WRITES and READS: round trips, write units, read units per acquire");
        printer.line("");
        print_checked(checked, printer);
    }

    fn print_rows(&self, printer: &mut Printer) {
        use Align::Right;
        let heads = [
            "SHARDS",
            "ACQUIRES/S",
            "RATIO",
            "P50",
            "P99",
            "MAX",
            "REFUSED",
            "TRIPS",
            "WRITES",
            "READS",
        ];
        let mut table = Columns::new(&heads.map(|head| (head, Right)));
        let row = |row: &RowJson| {
            let result = &row.result;
            let latency = &result.latency_ms;
            let time = |millis: Option<f64>| millis.map_or_else(none, report::time);
            let units = |units: Option<f64>| units.map_or_else(none, |units| format!("{units:.3}"));
            vec![
                Cell::from(row.shards),
                Cell::from(report::whole(result.acquires_per_second)),
                Cell::from(row.ratio.map_or_else(none, |ratio| format!("{ratio:.2}"))),
                Cell::from(time(latency.p50)),
                Cell::from(time(latency.p99)),
                Cell::from(time(latency.max)),
                Cell::from(grouped(result.refused)),
                Cell::from(units(result.round_trips_per_acquire)),
                Cell::from(units(result.write_units_per_acquire)),
                Cell::from(units(result.read_units_per_acquire)),
            ]
        };
        let rows: Vec<Vec<Cell>> = self.rows.iter().map(row).collect();
        table.print(printer, &rows);
    }
}

fn none() -> String {
    "-".to_owned()
}

#[cfg(test)]
mod tests;
