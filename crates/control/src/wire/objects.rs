//! The shared objects by their names: [`RuntimeWire`] opens them, [`EngineWire`] creates and removes them (AI-201 to
//! AI-203).

use std::time::Duration;

use super::slot::{Guard, MessageSlot, SlotLimits};
use super::system::{self, NamedSemaphore, SharedRegion};
use super::{Spin, WireError};

/// How the two processes wait for each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Synchronisation {
    /// Two named semaphores for each region.
    Semaphores,
    /// One futex word for each direction.
    Futex,
}

/// Names and sizes of the shared objects.
#[derive(Clone, Debug)]
pub struct WireConfig {
    /// What all names begin with; begins with `/`.
    pub prefix: String,
    /// How the processes wait.
    pub synchronisation: Synchronisation,
    /// Bytes of each of the four message regions.
    pub message_bytes: usize,
    /// Bytes of the region of masks.
    pub mask_bytes: usize,
    /// How long to spin before each wait.
    pub spin: Duration,
    /// How long the peer may keep a slot.
    pub limits: SlotLimits,
    /// The regions are these files instead, which have no names of their own.
    pub files: Option<RegionFiles>,
}

/// Paths of regions without names: those of the requests, the answers, the same of the side channel, and the masks.
pub type RegionFiles = [String; 5];

impl WireConfig {
    /// The defaults of the reference, with this prefix.
    #[must_use]
    pub fn new(prefix: impl Into<String>) -> Self {
        Self {
            prefix: prefix.into(),
            synchronisation: Synchronisation::Semaphores,
            message_bytes: 8 << 20,
            mask_bytes: 16 << 20,
            spin: Duration::from_millis(200),
            limits: SlotLimits {
                stall: STALL,
                unread: UNREAD,
            },
            files: None,
        }
    }

    fn region(&self, channel: Channel) -> String {
        if let Some(files) = &self.files {
            return files[channel as usize].clone();
        }
        // The suffix exists only with semaphores, where the plain names with `-wr` and `-rd` are taken.
        let suffix = match self.synchronisation {
            Synchronisation::Semaphores => "-shm",
            Synchronisation::Futex => "",
        };
        format!("{}{}{suffix}", self.prefix, channel.name())
    }

    fn masks(&self) -> String {
        if let Some([.., masks]) = &self.files {
            return masks.clone();
        }
        format!("{}bin-shm", self.prefix)
    }

    fn semaphore(&self, channel: Channel, kind: &str) -> String {
        format!("{}{}-{kind}", self.prefix, channel.name())
    }

    fn slot(
        &self,
        channel: Channel,
        region: impl FnOnce(&str, usize) -> Result<SharedRegion, WireError>,
        semaphore: impl Fn(&str, u32) -> Result<NamedSemaphore, WireError>,
    ) -> Result<MessageSlot, WireError> {
        let region = region(&self.region(channel), self.message_bytes)?;
        let guard = match self.synchronisation {
            Synchronisation::Semaphores => Guard::Semaphores {
                wr: semaphore(&self.semaphore(channel, "wr"), 1)?,
                rd: semaphore(&self.semaphore(channel, "rd"), 0)?,
            },
            // Each region has two slots; requests use the first, answers the second, the others stay unused.
            Synchronisation::Futex => Guard::Futex {
                word: if channel.is_response() {
                    self.message_bytes / 2
                } else {
                    0
                },
            },
        };
        // Only the main channel is in a hurry; a second spinning thread would take the peer's core.
        let spin = Spin::new(if channel.is_side() {
            Duration::ZERO
        } else {
            self.spin
        });
        Ok(MessageSlot::new(region, guard, spin, self.limits))
    }

    /// Removes whatever objects there are under these names.
    fn unlink(&self) -> Result<(), WireError> {
        for channel in Channel::ALL {
            system::unlink_region(&self.region(channel))?;
            if self.synchronisation == Synchronisation::Semaphores {
                system::unlink_semaphore(&self.semaphore(channel, "wr"))?;
                system::unlink_semaphore(&self.semaphore(channel, "rd"))?;
            }
        }
        system::unlink_region(&self.masks())
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Channel {
    Requests,
    Responses,
    SideRequests,
    SideResponses,
}

impl Channel {
    const ALL: [Self; 4] = [
        Self::Requests,
        Self::Responses,
        Self::SideRequests,
        Self::SideResponses,
    ];

    const fn name(self) -> &'static str {
        match self {
            Self::Requests => "cmd",
            Self::Responses => "resp",
            Self::SideRequests => "cmd-side",
            Self::SideResponses => "resp-side",
        }
    }

    const fn is_response(self) -> bool {
        matches!(self, Self::Responses | Self::SideResponses)
    }

    const fn is_side(self) -> bool {
        matches!(self, Self::SideRequests | Self::SideResponses)
    }
}

/// The shared objects, as the runtime uses them.
#[derive(Debug)]
pub struct RuntimeWire {
    /// The main channel's requests.
    pub requests: MessageSlot,
    /// The main channel's answers.
    pub responses: MessageSlot,
    /// The side channel's requests.
    pub side_requests: MessageSlot,
    /// The side channel's answers.
    pub side_responses: MessageSlot,
    /// The masks.
    pub masks: SharedRegion,
}

impl RuntimeWire {
    /// Opens the engine's objects, and creates those that are missing. With futexes the names of the message regions are
    /// removed at once, so that a crash leaves nothing (AI-202).
    ///
    /// # Errors
    /// [`WireError`].
    pub fn open(config: &WireConfig) -> Result<Self, WireError> {
        let open = match config.files {
            Some(_) => SharedRegion::open_file,
            None => SharedRegion::open,
        };
        let slot = |channel| config.slot(channel, open, NamedSemaphore::open);
        let wire = Self {
            requests: slot(Channel::Requests)?,
            responses: slot(Channel::Responses)?,
            side_requests: slot(Channel::SideRequests)?,
            side_responses: slot(Channel::SideResponses)?,
            masks: open(&config.masks(), config.mask_bytes)?,
        };
        if config.synchronisation == Synchronisation::Futex && config.files.is_none() {
            for channel in Channel::ALL {
                system::unlink_region(&config.region(channel))?;
            }
        }
        Ok(wire)
    }
}

/// The shared objects, as an engine creates them. All names are removed when it is dropped, on a panic too.
#[derive(Debug)]
pub struct EngineWire {
    /// The main channel's requests.
    pub requests: MessageSlot,
    /// The main channel's answers.
    pub responses: MessageSlot,
    /// The side channel's requests.
    pub side_requests: MessageSlot,
    /// The side channel's answers.
    pub side_responses: MessageSlot,
    /// The masks.
    pub masks: SharedRegion,
    /// Removes the names of all of them.
    pub names: WireNames,
}

impl EngineWire {
    /// Removes leftovers of the same user and creates all objects, with mode 0600 (AI-203). Whatever the runtime does to
    /// them, this process goes on (AI-223).
    ///
    /// # Errors
    /// [`WireError`], also for a leftover of another user.
    pub fn create(config: &WireConfig) -> Result<Self, WireError> {
        config.unlink()?;
        // Before the first object is created: if the third cannot be, the first two are removed.
        let names = WireNames::of(config, true);
        let slot = |channel| {
            config.slot(
                channel,
                SharedRegion::create_guarded,
                NamedSemaphore::create,
            )
        };
        Ok(Self {
            requests: slot(Channel::Requests)?,
            responses: slot(Channel::Responses)?,
            side_requests: slot(Channel::SideRequests)?,
            side_responses: slot(Channel::SideResponses)?,
            masks: SharedRegion::create_guarded(&config.masks(), config.mask_bytes)?,
            names,
        })
    }

    /// Returns what the names begin with.
    #[must_use]
    pub fn prefix(&self) -> &str {
        &self.names.config.prefix
    }

    /// Creates objects without names, of which nothing is left behind however the processes end. Returns where a child of this
    /// process finds them as long as they are open here. The processes wait on futexes: semaphores have names.
    ///
    /// # Errors
    /// [`WireError`].
    pub fn create_nameless(config: &WireConfig) -> Result<(Self, RegionFiles), WireError> {
        let config = WireConfig {
            synchronisation: Synchronisation::Futex,
            ..config.clone()
        };
        let mut files = RegionFiles::default();
        let mut region = |place: usize, name: &str, bytes| {
            let (region, path) = SharedRegion::create_nameless(name, bytes)?;
            files[place] = path;
            Ok(region)
        };
        let mut slot = |channel: Channel| {
            let create = |name: &str, bytes| region(channel as usize, name, bytes);
            config.slot(channel, create, NamedSemaphore::create)
        };
        let wire = Self {
            requests: slot(Channel::Requests)?,
            responses: slot(Channel::Responses)?,
            side_requests: slot(Channel::SideRequests)?,
            side_responses: slot(Channel::SideResponses)?,
            masks: region(Channel::ALL.len(), &config.masks(), config.mask_bytes)?,
            names: WireNames::of(&config, false),
        };
        Ok((wire, files))
    }
}

/// Removes the names, if there are any, when it is dropped.
#[derive(Debug)]
pub struct WireNames {
    config: WireConfig,
    /// The objects have names.
    named: bool,
}

impl WireNames {
    fn of(config: &WireConfig, named: bool) -> Self {
        let config = config.clone();
        Self { config, named }
    }
}

impl Drop for WireNames {
    fn drop(&mut self) {
        if self.named {
            // Nothing can be done about a failure here; the next engine of this name removes what is left.
            let _ = self.config.unlink();
        }
    }
}

/// A peer that keeps a slot for so long has died in the middle of a message (AI-213).
const STALL: Duration = Duration::from_secs(10);
/// An engine may load a model, or stand in a debugger, while an answer of the side channel waits for it.
const UNREAD: Duration = Duration::from_secs(300);
