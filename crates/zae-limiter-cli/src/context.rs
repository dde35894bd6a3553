//! The inputs that commands share: options, environment, clocks, the printer.

use std::collections::BTreeMap;
use std::io::BufRead;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use zae_limiter::model::NamespaceName;
use zae_limiter::store::{Store, StoreErrorKind};
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

/// A command that waits longer than this for a store says so.
const PATIENCE: Duration = Duration::from_secs(2);

/// The longest time from an interrupt to the end.
const STOP_TIMEOUT: Duration = Duration::from_secs(8);

#[cfg(feature = "aws")]
mod aws;

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
    /// Ends the process at once.
    exit: fn(u8),
    entropy: fn() -> Entropy,
    stdin: Box<dyn BufRead + Send>,
    store: Option<String>,
    /// `--name`.
    #[cfg(feature = "aws")]
    name: Option<zae_limiter::model::StackName>,
    region: Option<String>,
    endpoint_url: Option<String>,
    #[cfg(feature = "aws")]
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
        let (region, endpoint_url) = (globals.region.clone(), globals.endpoint_url.clone());
        #[cfg(feature = "aws")]
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
            exit: world.exit,
            entropy: world.entropy,
            stdin: world.stdin,
            store,
            #[cfg(feature = "aws")]
            name,
            region,
            endpoint_url,
            #[cfg(feature = "aws")]
            program: world.program,
            namespace: globals.namespace,
            env: world.env,
            data_dir: world.data_dir,
        }
    }

    /// Ends the process if it hangs after an interrupt, for example in writing to a pipe that nobody reads.
    pub(crate) fn end_after_an_interrupt(&self) {
        let (mut interrupts, clock) = (self.interrupts.clone(), Arc::clone(&self.clock));
        let exit = self.exit;
        tokio::spawn(async move {
            let interrupt = interrupts.next().await;
            clock.sleep(STOP_TIMEOUT).await;
            exit(interrupt.status().code());
        });
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
        if self.region.is_some() || self.endpoint_url.is_some() {
            let failure = Failure::usage("--region and --endpoint-url need a stack");
            return Err(failure.hint("name it: --name STACK"));
        }
        let Some(url) = self.var(vars::STORE) else { return Ok(None) };
        let read = grammar::store_url(url).map_err(|misread| {
            Failure::usage(format!("invalid value {url:?} for {}: {misread}", vars::STORE.name))
        });
        read.map(Some)
    }

    /// Whether the store is a DynamoDB table.
    pub(crate) fn is_on_dynamodb(&self) -> bool {
        self.store_url().is_ok_and(|url| url.starts_with("dynamodb:"))
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
        if !self.is_on_dynamodb() {
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
            let rejected =
                matches!(&error, Error::Store(error) if error.kind() == StoreErrorKind::Rejected);
            let failure = Failure::from(error);
            match failure.status {
                ExitStatus::Unavailable => failure.hint(self.advice_about(&url)),
                _ if rejected => failure.hint(self.advice_about(&url)),
                _ => failure,
            }
        })
    }

    /// Advice about a store that cannot be opened. Names the endpoint, also one of the environment.
    fn advice_about(&self, url: &str) -> String {
        let endpoint = self.var(vars::AWS_ENDPOINT_URL_DYNAMODB);
        match endpoint.or_else(|| self.var(vars::AWS_ENDPOINT_URL)) {
            Some(endpoint) if !url.contains("endpoint=") => format!(
                "check the network, the address of the store ({url}), and its endpoint: {endpoint}"
            ),
            _ => format!("check the network, and the address of the store: {url}"),
        }
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
        #[cfg(feature = "aws")]
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

    /// Creates the default file's folder only: a missing folder that the user named is more likely
    /// a typo.
    fn make_data_dir(&self, url: &str) -> Result<(), Failure> {
        match &self.data_dir {
            Some(folder) if self.store.is_none() && url.contains(&*folder.to_string_lossy()) => {
                create_private_dir(folder)
                    .map_err(|failure| failure.hint("name another place: --store sqlite:FILE"))
            }
            _ => Ok(()),
        }
    }

    /// Asks for confirmation, unless `--yes` was given. `what` says what will happen.
    ///
    /// # Errors
    ///
    /// When stdin is not a terminal, or the answer is no.
    pub(crate) async fn confirm(&mut self, yes: Yes, what: &str) -> Result<(), Failure> {
        if yes.yes {
            return Ok(());
        }
        self.check_can_ask(&format!("pass --yes to confirm: {what}"))?;
        self.ask(what).await
    }

    /// As [`confirm`](Self::confirm), but goes ahead if nobody can answer. Returns whether it asked.
    ///
    /// # Errors
    ///
    /// When the answer is no.
    pub(crate) async fn confirm_if_possible(
        &mut self,
        yes: Yes,
        what: &str,
    ) -> Result<bool, Failure> {
        if yes.yes || self.check_can_ask("").is_err() {
            return Ok(false);
        }
        self.ask(what).await.map(|()| true)
    }

    fn check_can_ask(&self, hint: &str) -> Result<(), Failure> {
        let why = match (self.printer.terminal.stdin, self.printer.is_json()) {
            (false, _) => "stdin is not a terminal",
            // The prompt would not be JSON.
            (true, true) => "the output format is JSON",
            (true, false) => return Ok(()),
        };
        Err(Failure::usage(format!("cannot ask for confirmation: {why}")).hint(hint))
    }

    async fn ask(&mut self, what: &str) -> Result<(), Failure> {
        let answer = self.answer(&format!("{what}. Go ahead? [y/N] ")).await;
        if matches!(answer.trim(), "y" | "Y" | "yes" | "Yes") {
            return Ok(());
        }
        Err(Failure::new(ExitStatus::Error, "not confirmed: nothing was changed"))
    }

    /// Prompts, and reads a line. An unreadable stream leaves the answer empty.
    async fn answer(&mut self, prompt: &str) -> String {
        self.printer.write_err(prompt);
        // On a thread of its own, so that Ctrl-C ends a command that waits for an answer. That leaves the thread to the
        // end of the process.
        let mut stdin = std::mem::replace(&mut self.stdin, Box::new(std::io::empty()));
        let (send, line) = tokio::sync::oneshot::channel();
        std::thread::spawn(move || {
            let mut line = String::new();
            let _ = stdin.read_line(&mut line);
            let _ = send.send((stdin, line));
        });
        let mut answer = String::new();
        if let Ok((stdin, line)) = line.await {
            (self.stdin, answer) = (stdin, line);
        }
        if !answer.ends_with('\n') {
            // At the end of input no Enter has ended the prompt's line.
            self.printer.write_err("\n");
        }
        answer
    }

    /// Sleeps.
    pub(crate) async fn wait(&self, wait: Duration) {
        self.pace.sleep(wait).await;
    }
}

/// Creates a folder, and its parents, that only its owner can enter. An existing folder keeps its mode.
fn create_private_dir(folder: &Path) -> Result<(), Failure> {
    let mut builder = std::fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(folder).map_err(|error| {
        let message = format!("could not create {}", folder.display());
        Failure::new(ExitStatus::Error, message).caused_by(&error)
    })
}

/// `-y`, on every command that deletes or drops something.
#[derive(clap::Args, Clone, Copy, Debug, Default)]
pub(crate) struct Yes {
    /// Go ahead without asking
    #[arg(short, long)]
    pub yes: bool,
}
