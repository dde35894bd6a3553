//! The inputs that commands share: options, environment, clocks, the printer.

use std::collections::BTreeMap;
use std::io::BufRead;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use zae_limiter::dynamodb::aws::DynamoAddress;
use zae_limiter::model::{Invalid, NamespaceName, StackName};
use zae_limiter::store::Store;
use zae_limiter::testing::{Clock, Entropy};
use zae_limiter::{Builder, Error, RateLimiter, StoreUrl};

use crate::cli::Globals;
use crate::exit::ExitStatus;
use crate::failure::Failure;
use crate::grammar;
use crate::interrupts::Interrupts;
use crate::printer::{Printer, Verbosity};
use crate::suggestion::Place;
use crate::vars;
use crate::world::World;

/// The error when a command needs confirmation but nobody can answer.
const NOT_A_TERMINAL: &str = "cannot ask for confirmation: stdin is not a terminal";

/// The time limit of a call to AWS, unless `ZAEL_AWS_TIMEOUT` is set.
const AWS_TIMEOUT: Duration = zae_limiter_infra::aws::CALL_TIMEOUT;
/// A command that waits longer than this for a store says so.
const PATIENCE: Duration = Duration::from_secs(2);

/// The inputs that commands share.
pub(crate) struct Context {
    /// Writes stdout and stderr.
    pub printer: Printer,
    /// The limiter's clock.
    pub clock: Arc<dyn Clock>,
    /// The clock that commands sleep and measure with.
    pub pace: Arc<dyn Clock>,
    /// Ctrl-C and SIGTERM.
    pub interrupts: Interrupts,
    entropy: fn() -> Entropy,
    stdin: Box<dyn BufRead + Send>,
    store: Option<String>,
    /// `--name`.
    name: Option<StackName>,
    /// `--region` and `--endpoint-url`, with an empty table name.
    nameless: DynamoAddress,
    program: Option<PathBuf>,
    namespace: Option<NamespaceName>,
    env: BTreeMap<String, String>,
    data_dir: Option<PathBuf>,
}

impl std::fmt::Debug for Context {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Context").field("store", &self.store).finish_non_exhaustive()
    }
}

impl Context {
    pub(crate) fn new(globals: Globals, world: World, mut printer: Printer) -> Self {
        printer.output = globals.output;
        printer.place = Place::of(&globals);
        printer.verbosity = match (globals.quiet, globals.verbose) {
            (true, _) => Verbosity::Quiet,
            (false, true) => Verbosity::Verbose,
            (false, false) => Verbosity::Normal,
        };
        let nameless = DynamoAddress {
            table: String::new(),
            region: globals.region.clone(),
            endpoint: globals.endpoint_url.clone(),
        };
        let name = globals.name.clone();
        let store = globals.store.or_else(|| {
            let stack = globals.name?;
            let region = globals.region.map(|region| format!("region={region}"));
            let endpoint = globals.endpoint_url.map(|url| format!("endpoint={url}"));
            let query: Vec<String> = region.into_iter().chain(endpoint).collect();
            let mark = if query.is_empty() { "" } else { "?" };
            Some(format!("dynamodb:{stack}{mark}{}", query.join("&")))
        });
        Self {
            printer,
            clock: world.clock,
            pace: world.pace,
            interrupts: world.interrupts,
            entropy: world.entropy,
            stdin: world.stdin,
            store,
            name,
            nameless,
            program: world.program,
            namespace: globals.namespace,
            env: world.env,
            data_dir: world.data_dir,
        }
    }

    fn var(&self, var: vars::Var) -> Option<&str> {
        self.env.get(var.name).map(String::as_str).filter(|value| !value.is_empty())
    }

    /// The address of the store from the options, else from the environment.
    ///
    /// # Errors
    ///
    /// When the address is invalid.
    pub(crate) fn chosen_store_url(&self) -> Result<Option<String>, Failure> {
        if let Some(url) = &self.store {
            return Ok(Some(url.clone()));
        }
        if self.nameless.region.is_some() || self.nameless.endpoint.is_some() {
            let failure = Failure::usage("--region and --endpoint-url need a stack");
            return Err(failure.hint("name it: --name STACK"));
        }
        let Some(url) = self.var(vars::STORE) else { return Ok(None) };
        let read = grammar::store_url(url).map_err(|misread| {
            Failure::usage(format!("invalid value {url:?} for {}: {misread}", vars::STORE.name))
        });
        read.map(Some)
    }

    /// The address of the store: the chosen one, else the file in the data directory.
    ///
    /// # Errors
    ///
    /// When the address is invalid, or there is no data directory.
    pub(crate) fn store_url(&self) -> Result<String, Failure> {
        if let Some(url) = self.chosen_store_url()? {
            return Ok(url);
        }
        let Some(folder) = &self.data_dir else {
            let failure = Failure::usage("found no home directory for the default store");
            return Err(failure.hint("name a file: --store sqlite:limits.db"));
        };
        Ok(format!("sqlite:{}", folder.join("limits.db").display()))
    }

    /// The stack named with `--name` alone.
    pub(crate) fn stack_name(&self) -> Option<&StackName> {
        self.name.as_ref()
    }

    /// The time limit of one call to AWS.
    ///
    /// # Errors
    ///
    /// When the environment variable holds no duration.
    pub(crate) fn aws_timeout(&self) -> Result<Duration, Failure> {
        let Some(text) = self.var(vars::AWS_TIMEOUT) else { return Ok(AWS_TIMEOUT) };
        match grammar::duration(text) {
            Ok(Duration::ZERO) => {
                Err(self.wrong_var(vars::AWS_TIMEOUT, &"no call ends in no time"))
            }
            Ok(limit) => Ok(limit),
            Err(misread) => Err(self.wrong_var(vars::AWS_TIMEOUT, &misread)),
        }
    }

    fn wrong_var(&self, var: vars::Var, why: &dyn std::fmt::Display) -> Failure {
        let value = self.var(var).unwrap_or_default();
        Failure::usage(format!("invalid value {value:?} for {}: {why}", var.name))
    }

    /// Checks the region and the endpoint that the SDK will take from the environment, before any call.
    fn check_environment(&self, address: &DynamoAddress) -> Result<(), Failure> {
        type Rule = fn(&str) -> Result<(), Invalid>;
        let region: (_, Rule) = (&address.region, StoreUrl::check_region);
        let endpoint: (_, Rule) = (&address.endpoint, StoreUrl::check_endpoint);
        for (var, (given, rule)) in [
            (vars::AWS_REGION, region),
            (vars::AWS_DEFAULT_REGION, region),
            (vars::AWS_ENDPOINT_URL_DYNAMODB, endpoint),
            (vars::AWS_ENDPOINT_URL, endpoint),
        ] {
            if given.is_none()
                && let Some(value) = self.var(var)
            {
                rule(value).map_err(|invalid| self.wrong_var(var, &invalid.rule()))?;
            }
        }
        Ok(())
    }

    /// The stack named with `--name` or as the store.
    ///
    /// # Errors
    ///
    /// When neither names a stack.
    pub(crate) fn stack(&self) -> Result<DynamoAddress, Failure> {
        if let Some(url) = self.chosen_store_url()?
            && let StoreUrl::Dynamodb(address) = url.parse().map_err(Error::Invalid)?
        {
            self.check_environment(&address)?;
            return Ok(address);
        }
        Err(Failure::usage("no stack was named").hint("name it: --name STACK"))
    }

    /// The requested account and region, with or without a stack.
    ///
    /// # Errors
    ///
    /// When the store's address is invalid.
    pub(crate) fn account(&self) -> Result<DynamoAddress, Failure> {
        let nameless = || {
            self.check_environment(&self.nameless)?;
            Ok(self.nameless.clone())
        };
        if self.nameless.region.is_some() || self.nameless.endpoint.is_some() {
            return nameless();
        }
        match self.stack() {
            Ok(address) => Ok(address),
            Err(_) if self.store.is_none() => nameless(),
            Err(failure) => Err(failure),
        }
    }

    /// The path of this program.
    ///
    /// # Errors
    ///
    /// When the operating system does not report it.
    pub(crate) fn program(&self) -> Result<&std::path::Path, Failure> {
        self.program.as_deref().ok_or_else(|| {
            let failure =
                Failure::new(ExitStatus::Error, "could not find the path of this program");
            failure.hint("name the aggregator's executable: --bootstrap FILE")
        })
    }

    /// The requested namespace, else `default`.
    ///
    /// # Errors
    ///
    /// When the environment variable holds an invalid name.
    pub(crate) fn namespace(&self) -> Result<NamespaceName, Failure> {
        if let Some(name) = &self.namespace {
            return Ok(name.clone());
        }
        let name = self.var(vars::NAMESPACE).unwrap_or("default");
        grammar::namespace_name(name).map_err(|misread| {
            Failure::usage(format!(
                "invalid value {name:?} for {}: {misread}",
                vars::NAMESPACE.name
            ))
        })
    }

    /// Whether a namespace was named with `-N`.
    pub(crate) fn has_namespace(&self) -> bool {
        self.namespace.is_some()
    }

    /// Opens the requested store, and a limiter in the requested namespace.
    ///
    /// # Errors
    ///
    /// When the store cannot be opened, or has no such namespace.
    pub(crate) async fn limiter(&mut self) -> Result<RateLimiter, Failure> {
        let namespace = self.namespace()?;
        let builder = self.builder()?.namespace(namespace.as_str());
        self.open(builder).await
    }

    /// As [`limiter`](Self::limiter), but in the namespace `default`: for commands about the whole
    /// store.
    ///
    /// # Errors
    ///
    /// When the store cannot be opened.
    pub(crate) async fn default_limiter(&mut self) -> Result<RateLimiter, Failure> {
        let builder = self.builder()?;
        self.open(builder).await
    }

    /// Opens a limiter. If that takes long, a terminal shows what it waits for. Embedded stores open at once.
    async fn open(&mut self, builder: Builder) -> Result<RateLimiter, Failure> {
        let url = self.store_url()?;
        if !url.starts_with("dynamodb:") {
            return Ok(builder.open().await?);
        }
        let mut opening = std::pin::pin!(builder.open());
        let opened = tokio::select! {
            biased;
            opened = &mut opening => opened,
            () = self.pace.sleep(PATIENCE), if self.printer.shows_progress() => {
                self.printer.progress("waiting for the store…");
                opening.await
            }
        };
        self.printer.wipe_progress();
        opened.map_err(|error| {
            let failure = Failure::from(error);
            match failure.status {
                ExitStatus::Unavailable => {
                    failure.hint(format!("check the network, and the address of the store: {url}"))
                }
                _ => failure,
            }
        })
    }

    /// A builder on the requested store.
    ///
    /// # Errors
    ///
    /// When the store cannot be opened.
    pub(crate) fn builder(&mut self) -> Result<Builder, Failure> {
        let url = self.store_url()?;
        self.printer.detail(format!("store: {url}"));
        if url == "memory:" && self.printer.terminal.stderr {
            self.printer.warn("memory: loses everything when this command ends; use sqlite:FILE");
        }
        self.make_data_dir(&url)?;
        self.builder_on(&url)
    }

    /// A builder on the store at `url`.
    ///
    /// # Errors
    ///
    /// When the store cannot be opened.
    pub(crate) fn builder_on(&self, url: &str) -> Result<Builder, Failure> {
        let url: StoreUrl = url.parse().map_err(Error::Invalid)?;
        if let StoreUrl::Dynamodb(address) = &url {
            self.check_environment(address)?;
        }
        Ok(self.builder_over(url.open()?))
    }

    /// A builder over a store that is open.
    pub(crate) fn builder_over(&self, store: Arc<dyn Store>) -> Builder {
        let principal = self.var(vars::PRINCIPAL).or_else(|| self.var(vars::USER));
        let builder =
            RateLimiter::builder(store).clock(Arc::clone(&self.clock)).entropy((self.entropy)());
        match principal {
            Some(principal) => builder.principal(principal),
            None => builder,
        }
    }

    /// A source of random ids.
    pub(crate) fn entropy(&self) -> Entropy {
        (self.entropy)()
    }

    /// The path of a file in the data directory. Creates the directory.
    ///
    /// # Errors
    ///
    /// When there is no data directory, or it cannot be created.
    pub(crate) fn data_file(&self, name: &str) -> Result<PathBuf, Failure> {
        let Some(folder) = &self.data_dir else {
            return Err(Failure::usage("found no home directory for data files"));
        };
        std::fs::create_dir_all(folder).map_err(|error| {
            let message = format!("could not create {}", folder.display());
            Failure::new(ExitStatus::Error, message).caused_by(&error)
        })?;
        Ok(folder.join(name))
    }

    /// The folders of `PATH`.
    pub(crate) fn search_path(&self) -> Vec<PathBuf> {
        self.var(vars::PATH).map(|path| std::env::split_paths(path).collect()).unwrap_or_default()
    }

    /// The program that `ZAEL_LOCAL` names for `local`.
    pub(crate) fn local_program(&self) -> Option<PathBuf> {
        self.var(vars::LOCAL).map(PathBuf::from)
    }

    /// Creates the default file's folder only: a missing folder that the user named is more likely
    /// a typo.
    fn make_data_dir(&self, url: &str) -> Result<(), Failure> {
        match &self.data_dir {
            Some(folder) if self.store.is_none() && url.contains(&*folder.to_string_lossy()) => {
                std::fs::create_dir_all(folder).map_err(|error| {
                    let message = format!("could not create {}", folder.display());
                    let failure = Failure::new(ExitStatus::Error, message).caused_by(&error);
                    failure.hint("name another place: --store sqlite:FILE")
                })
            }
            _ => Ok(()),
        }
    }

    /// Asks for confirmation, unless `--yes` was given. `what` says what will happen.
    ///
    /// # Errors
    ///
    /// When stdin is not a terminal, or the answer is no.
    pub(crate) fn confirm(&mut self, yes: Yes, what: &str) -> Result<(), Failure> {
        if yes.yes {
            return Ok(());
        }
        if !self.printer.terminal.stdin {
            let failure = Failure::usage(NOT_A_TERMINAL);
            return Err(failure.hint(format!("pass --yes to confirm: {what}")));
        }
        self.printer.write_err(&format!("{what}. Go ahead? [y/N] "));
        let mut answer = String::new();
        // An unreadable stream leaves the answer empty, and empty means no.
        let _ = self.stdin.read_line(&mut answer);
        if !answer.ends_with('\n') {
            // At the end of input no Enter has ended the prompt's line.
            self.printer.write_err("\n");
        }
        if matches!(answer.trim(), "y" | "Y" | "yes" | "Yes") {
            return Ok(());
        }
        Err(Failure::new(ExitStatus::Error, "not confirmed: nothing was changed"))
    }

    /// Asks the user to type a name before it is deleted for good, unless `--yes` was given.
    ///
    /// # Errors
    ///
    /// When stdin is not a terminal, or the answer is not the name.
    pub(crate) fn confirm_name(&mut self, yes: Yes, name: &str) -> Result<(), Failure> {
        if yes.yes {
            return Ok(());
        }
        if !self.printer.terminal.stdin {
            let failure = Failure::usage(NOT_A_TERMINAL);
            return Err(failure.hint(format!("pass --yes to confirm that {name} will be deleted")));
        }
        self.printer.write_err(&format!("Type {name} to go ahead: "));
        let mut answer = String::new();
        // An unreadable stream leaves the answer empty, and empty is not the name.
        let _ = self.stdin.read_line(&mut answer);
        if !answer.ends_with('\n') {
            self.printer.write_err("\n");
        }
        if answer.trim() == name {
            return Ok(());
        }
        Err(Failure::new(ExitStatus::Error, "not confirmed: nothing was changed"))
    }

    /// Sleeps.
    pub(crate) async fn wait(&self, wait: Duration) {
        self.pace.sleep(wait).await;
    }
}

/// `-y`, on every command that deletes something.
#[derive(clap::Args, Clone, Copy, Debug, Default)]
pub(crate) struct Yes {
    /// Go ahead without asking
    #[arg(short, long)]
    pub yes: bool,
}
