//! The inputs of commands that need AWS or an endpoint of DynamoDB.

use std::path::PathBuf;
use std::time::Duration;

use zae_limiter::dynamodb::aws::DynamoAddress;
use zae_limiter::model::{Invalid, StackName};
use zae_limiter::testing::Entropy;
use zae_limiter::{Error, StoreUrl};

use super::{Context, Yes, create_private_dir};
use crate::exit::ExitStatus;
use crate::failure::Failure;
use crate::{grammar, vars};

/// The time limit of a call to AWS, unless `ZAEL_AWS_TIMEOUT` is set.
const AWS_TIMEOUT: Duration = zae_limiter_infra::aws::CALL_TIMEOUT;

impl Context {
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

    /// Checks the region and the endpoint that the SDK will take from the environment, before any call.
    pub(super) fn check_environment(&self, address: &DynamoAddress) -> Result<(), Failure> {
        type Rule = fn(&str) -> Result<(), Invalid>;
        let region: (_, Rule) = (&address.region, StoreUrl::check_region);
        let endpoint: (_, Rule) = (&address.endpoint, StoreUrl::check_endpoint);
        let all = [
            (vars::AWS_REGION, region),
            (vars::AWS_DEFAULT_REGION, region),
            (vars::AWS_ENDPOINT_URL_DYNAMODB, endpoint),
            (vars::AWS_ENDPOINT_URL, endpoint),
        ];
        let of_services = vars::AWS_ENDPOINT_URLS.map(|var| (var, endpoint));
        for (var, (given, rule)) in all.into_iter().chain(of_services) {
            let value = self.env.get(var.name).filter(|_| given.is_none());
            match value.map(String::as_str) {
                // Empty counts as unset, but the SDK panics on an empty endpoint.
                Some("") if var.name.starts_with(vars::AWS_ENDPOINT_URL.name) => {
                    let failure = self.wrong_var(var, &"it is empty");
                    return Err(failure.hint(format!("unset {}", var.name)));
                }
                None | Some("") => {}
                Some(value) => {
                    rule(value).map_err(|invalid| self.wrong_var(var, &invalid.rule()))?;
                }
            }
        }
        Ok(())
    }

    /// The table of the store at `url`, which may be none of DynamoDB.
    ///
    /// # Errors
    ///
    /// When the address is invalid, or the environment names an invalid region or endpoint.
    pub(crate) fn table_at(&self, url: &str) -> Result<Option<DynamoAddress>, Failure> {
        let StoreUrl::Dynamodb(address) = url.parse().map_err(Error::Invalid)? else {
            return Ok(None);
        };
        self.check_environment(&address)?;
        Ok(Some(address))
    }

    /// The stack named with `--name` or as the store.
    ///
    /// # Errors
    ///
    /// When neither names a stack.
    pub(crate) fn stack(&self) -> Result<DynamoAddress, Failure> {
        if let Some(url) = self.chosen_store_url()?
            && let Some(address) = self.table_at(&url)?
        {
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
            let address = DynamoAddress {
                table: String::new(),
                region: self.region.clone(),
                endpoint: self.endpoint_url.clone(),
            };
            self.check_environment(&address)?;
            Ok(address)
        };
        if self.region.is_some() || self.endpoint_url.is_some() {
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

    /// Whether a namespace was named with `-N`.
    pub(crate) fn has_namespace(&self) -> bool {
        self.namespace.is_some()
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
        create_private_dir(folder)?;
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

    /// Asks the user to type a name before it is deleted for good, unless `--yes` was given.
    ///
    /// # Errors
    ///
    /// When stdin is not a terminal, or the answer is not the name.
    pub(crate) async fn confirm_name(&mut self, yes: Yes, name: &str) -> Result<(), Failure> {
        if yes.yes {
            return Ok(());
        }
        self.check_can_ask(&format!("pass --yes to confirm that {name} will be deleted"))?;
        let answer = self.answer(&format!("Type {name} to go ahead: ")).await;
        if answer.trim() == name {
            return Ok(());
        }
        Err(Failure::new(ExitStatus::Error, "not confirmed: nothing was changed"))
    }

    fn wrong_var(&self, var: vars::Var, why: &dyn std::fmt::Display) -> Failure {
        let value = self.var(var).unwrap_or_default();
        Failure::usage(format!("invalid value {value:?} for {}: {why}", var.name))
    }
}
