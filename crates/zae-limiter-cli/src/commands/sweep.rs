//! `sweep`

use serde::Serialize;
use zae_limiter::model::Orphans;

use crate::columns::{Align, Cell, Columns};
use crate::context::{Context, Yes};
use crate::exit::ExitStatus;
use crate::failure::Failure;
use crate::printer::count;

const AFTER_HELP: &str = "\
Examples:
  zae-limiter sweep --dry-run           shows what would be removed
  zae-limiter sweep                     shows it, asks, and removes it
  zae-limiter sweep --yes -o json       for scripts

It removes what no other command finds:
  - items of namespaces that do not exist: a program that was still running in a purged
    namespace, or an aggregator of an earlier release, wrote them
  - usage of deleted entities, if nothing else of the entity exists and it was not used again
  - names that point to nothing, so that they can be registered again
  - tombstones past their time
A registered namespace that has lost its name is deleted, and can be recovered or purged.

It never touches namespaces that are registered or deleted, whatever client made them, nor items
that are not a limiter's. What happened less than 15 minutes ago waits for the next sweep.

It reads the whole store. On DynamoDB that is a scan, and needs the permission dynamodb:Scan: the
policy my-app-full has it.";

/// Arguments of `sweep`.
#[derive(clap::Args, Debug)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct Args {
    /// Show what would be removed, and remove nothing
    #[arg(long, conflicts_with = "yes")]
    dry_run: bool,

    #[command(flatten)]
    yes: Yes,
}

#[derive(Serialize)]
struct SweptJson {
    scanned: u64,
    orphans: OrphansJson,
    /// Names that were left alone, because their namespaces have items but no record.
    broken_names: u64,
    /// `null` for a dry run.
    removed: Option<u64>,
}

#[derive(Serialize)]
struct OrphansJson {
    namespaces: u64,
    buckets: u64,
    entities: u64,
    limits: u64,
    usage: u64,
    audit_events: u64,
    other: u64,
    deleted_usage: u64,
    names: u64,
    nameless: u64,
    tombstones: u64,
}

impl From<&Orphans> for OrphansJson {
    fn from(found: &Orphans) -> Self {
        Self {
            namespaces: found.namespaces(),
            buckets: found.items.buckets,
            entities: found.items.entities,
            limits: found.items.limits,
            usage: found.items.usage,
            audit_events: found.items.audit_events,
            other: found.items.other,
            deleted_usage: found.deleted_usage,
            names: found.names(),
            nameless: found.nameless(),
            tombstones: found.tombstones(),
        }
    }
}

impl OrphansJson {
    fn rows(&self) -> Vec<Vec<Cell>> {
        let of_namespaces = format!("of {}", count(self.namespaces, "missing namespace"));
        let rows = [
            ("buckets", of_namespaces.as_str(), self.buckets),
            ("entities", &of_namespaces, self.entities),
            ("limits", &of_namespaces, self.limits),
            ("usage", &of_namespaces, self.usage),
            ("audit events", &of_namespaces, self.audit_events),
            ("other items", &of_namespaces, self.other),
            ("usage", "of deleted entities", self.deleted_usage),
            ("names", "that point to nothing", self.names),
            ("namespaces", "without a name, to be deleted", self.nameless),
            ("tombstones", "past their time", self.tombstones),
        ];
        let found = rows.into_iter().filter(|(.., number)| *number > 0);
        found.map(|(kind, of, number)| vec![kind.into(), of.into(), number.into()]).collect()
    }
}

pub(crate) async fn run(args: Args, context: &mut Context) -> Result<ExitStatus, Failure> {
    let namespaces = context.default_limiter().await?.namespaces();
    let printer = &mut context.printer;
    printer.progress("reading the store");
    let progress = |items| printer.progress(format!("reading the store: {}", count(items, "item")));
    let found = namespaces.find_orphans(progress).await?;
    context.printer.wipe_progress();
    let orphans = OrphansJson::from(&found);
    if !context.printer.is_json() {
        let heads = [("KIND", Align::Left), ("WHICH", Align::Left), ("COUNT", Align::Right)];
        let rows = orphans.rows();
        if !rows.is_empty() {
            Columns::new(&heads).print(&mut context.printer, &rows);
        }
    }
    if found.broken_names > 0 {
        context.printer.warn(format!(
            "{} to a namespace that has items, but no record; they were left alone. \
             Register the name again, then sweep again: zae-limiter namespace register NAME",
            match found.broken_names {
                1 => "1 name points".to_owned(),
                many => format!("{many} names point"),
            }
        ));
    }
    let removed = match args.dry_run || found.is_empty() {
        true => None,
        false => {
            let question =
                format!("{} will be removed permanently", count(found.total(), "orphan"));
            context.confirm(args.yes, &question).await?;
            let printer = &mut context.printer;
            let progress = |items| printer.progress(format!("sweeping: {}", count(items, "item")));
            Some(namespaces.remove_orphans(&found, progress).await?)
        }
    };
    let words = match removed {
        Some(removed) => format!("removed {}", count(removed, "orphan")),
        None if found.is_empty() => {
            format!("nothing to sweep among {}", count(found.scanned, "item"))
        }
        None => format!(
            "{} among {}; remove them: zae-limiter sweep",
            count(found.total(), "orphan"),
            count(found.scanned, "item")
        ),
    };
    let removed = if args.dry_run { None } else { Some(removed.unwrap_or_default()) };
    let (scanned, broken_names) = (found.scanned, found.broken_names);
    context.printer.done(&SweptJson { scanned, orphans, broken_names, removed }, words);
    Ok(ExitStatus::Done)
}
